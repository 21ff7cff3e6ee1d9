"""The one table of public functions. A row buys every transform, law, compilation, benchmark."""

from tests.table import heads, losses, norms_and_gates, preference
from tests.table.row import COLUMNS as COLUMNS
from tests.table.row import LEADS as LEADS
from tests.table.row import WIDTHS as WIDTHS
from tests.table.row import Bench as Bench
from tests.table.row import Draw as Draw
from tests.table.row import Row as Row
from tests.table.row import Sizes as Sizes
from tests.table.row import bind as bind

ROWS = [*norms_and_gates.ROWS, *losses.ROWS, *heads.ROWS, *preference.ROWS]
