"""Squared ReLU.

    y  = max(x, 0)**2            x, y: (..., n)
    dx = dy * 2 * max(x, 0)

Rule, kernels and dtypes are those of the gates, in `_gated`, without a second factor. So, Manke,
Liu, Dai, Shazeer and Le, 2021, arXiv:2109.08668.
"""

from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn.ops._gated import gated

_relu2 = gated("relu2")


def relu2(x: Tensor) -> Tensor:
    """Square the positive part of each entry.

    Args:
        x: activations (..., n).

    Returns:
        Tensor (..., n) in the dtype of x.

    Raises:
        ValueError: x has no axis.
        TypeError: x is not a floating tensor.

    Example:
        >>> relu2(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])

    References:
        So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021,
        arXiv:2109.08668.
    """
    check_tensors("relu2", x=(x, "... n"))
    return _relu2(x, None, act="relu2")
