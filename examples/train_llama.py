"""Train a small Llama on the source of Python's standard library, byte by byte.

    python examples/train_llama.py              # two CPU cores: one to two minutes
    python examples/train_llama.py --plain      # the same model on plain torch functions
    python examples/train_llama.py --compare    # both from one seed: how far apart, speed, memory
    python examples/train_llama.py --compile    # the loss through torch.compile
    python examples/train_llama.py --resume     # go on after Ctrl-C

The model is a dict of parameters and `loss(params, batch)`. What liger_fn brings is the four
functions in `LIGER`; `PLAIN` holds the same four in plain torch. A CUDA device gets a model of
186 M parameters under bfloat16 autocast instead of 0.85 M in float32. Nothing is downloaded.

Needs `pip install -e ".[examples]"` in the checkout.
"""

import argparse
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# OpenMP reads this as torch loads: its threads wait asleep, not spinning. On two idle cores a step
# takes 0.14 s instead of 0.10, on two that others use as well 0.3 s instead of 0.5 to 2.4
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import liger_fn

Params = dict[str, Tensor]
State = dict[str, Any]  # of a run: what a checkpoint holds
Loss = Callable[[Params, Tensor], Tensor]
VOCAB = 256
CHECKPOINT = "checkpoint.pt"
SAVE_EVERY = 100  # steps


@dataclass(frozen=True)
class Config:
    """All that decides the numbers of a run; the defaults are for two CPU cores."""

    width: int = 128
    layers: int = 4
    head_width: int = 32
    context: int = 128
    batch: int = 16
    steps: int = 400
    lr: float = 4e-3
    seed: int = 0
    functions: str = "liger"


CPU = Config()
GPU = Config(width=1024, layers=16, head_width=64, context=1024, batch=16, steps=1000, lr=6e-4)


# -- the four functions ----------------------------------------------------------------------------


class Functions(NamedTuple):
    """What the model is built from, beside F.linear, F.embedding and attention."""

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    head_loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    return turned(q), turned(k)


def plain_head_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).flatten(0, -2), y.flatten())


LIGER = Functions(liger_fn.rms_norm, liger_fn.swiglu, liger_fn.rope, liger_fn.fused_linear_ce)
PLAIN = Functions(plain_rms_norm, plain_swiglu, plain_rope, plain_head_loss)


def functions(config: Config) -> Functions:
    return LIGER if config.functions == "liger" else PLAIN


# -- the model -------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    d, kv = config.width, config.width // 2  # half as many heads for keys and values
    f = -(-8 * d // 3 // 64) * 64
    layer: dict[str, tuple[int, ...]] = {
        "norm_attention": (d,), "wq": (d, d), "wk": (kv, d), "wv": (kv, d), "wo": (d, d),
        "norm_mlp": (d,), "gate": (f, d), "up": (f, d), "down": (d, f),
    }  # fmt: skip
    layers = {f"{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()}
    return {"embedding": (VOCAB, d), **layers, "norm": (d,), "head": (VOCAB, d)}


def init(config: Config, generator: torch.Generator) -> Params:
    params = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            params[name] = torch.ones(shape)
            continue
        std = 0.02 if name in ("embedding", "head") else shape[1] ** -0.5
        if name.endswith((".wo", ".down")):  # 2 * layers of these add up in the residual stream
            std /= math.sqrt(2 * config.layers)
        params[name] = torch.randn(shape, generator=generator) * std
    return params


def rope_table(t: int, r: int, device: torch.device) -> tuple[Tensor, Tensor]:
    speed = 10000.0 ** (-torch.arange(0, r, 2, device=device) / r)
    angle = torch.arange(t, device=device)[:, None] * torch.cat((speed, speed))  # (t, r)
    return angle.cos(), angle.sin()


def block(w: Params, x: Tensor, cos: Tensor, sin: Tensor, config: Config) -> Tensor:
    f = functions(config)
    h = f.rms_norm(x, w["norm_attention"])
    q, k, v = (
        F.linear(h, w[name]).unflatten(-1, (-1, config.head_width)).transpose(1, 2)
        for name in ("wq", "wk", "wv")
    )  # (b, h, t, k)
    q, k = f.rope(q, k, cos, sin)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(o.transpose(1, 2).flatten(2), w["wo"])
    h = f.rms_norm(x, w["norm_mlp"])
    return x + F.linear(f.swiglu(F.linear(h, w["gate"]), F.linear(h, w["up"])), w["down"])


def hidden(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Map tokens (b, t) to what the head reads (b, t, d)."""
    x = F.embedding(tokens, params["embedding"])
    cos, sin = rope_table(tokens.shape[1], config.head_width, tokens.device)
    for i in range(config.layers):
        prefix = f"{i}."
        w = {k.removeprefix(prefix): p for k, p in params.items() if k.startswith(prefix)}
        x = block(w, x, cos, sin, config)
    return functions(config).rms_norm(x, params["norm"])


def loss(params: Params, batch: Tensor, *, config: Config) -> Tensor:
    """Mean nats per byte of batch (b, t + 1): each byte is predicted from those before it."""
    x = hidden(params, batch[:, :-1], config)
    return functions(config).head_loss(params["head"], x, batch[:, 1:])


def precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def generate(params: Params, prompt: bytes, length: int, config: Config) -> str:
    """Continue the prompt at a temperature of 0.8; for so little text, without a cache."""
    device, text = params["head"].device, [*prompt]
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(length):
        tokens = torch.tensor([text[-config.context :]], device=device)
        with precision(device):
            logits = F.linear(hidden(params, tokens, config)[0, -1], params["head"])
        p = torch.softmax(logits.float().cpu() / 0.8, -1)
        text.append(int(torch.multinomial(p, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


# -- the data --------------------------------------------------------------------------------------


def corpus() -> tuple[Tensor, Tensor]:
    """Read the standard library: the bytes to train on, and those of each 20th file, held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = (p for p in root.rglob("*.py") if skipped.isdisjoint(p.relative_to(root).parts))
    files = [p.read_bytes() for p in sorted(paths)]
    if len(files) < 20:
        raise SystemExit(f"{root}: {len(files)} source files, this Python came without its library")
    held = bytearray(b"\n".join(files[::20]))
    del files[::20]
    text = bytearray(b"\n".join(files))
    return torch.frombuffer(text, dtype=torch.uint8), torch.frombuffer(held, dtype=torch.uint8)


def batch_at(text: Tensor, step: int, config: Config, device: torch.device) -> Tensor:
    """Draw a batch (b, t + 1) from seed and step alone: there is no random state to save."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    start = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
    return text[start + torch.arange(config.context + 1)].to(device, torch.int64)


# -- state and checkpoints -------------------------------------------------------------------------


def fresh(config: Config) -> State:
    params = init(config, torch.Generator().manual_seed(config.seed))
    start: State = {"optimizer": None, "losses": [], "seconds": [], "memory": 0.0}
    return {"config": asdict(config), "params": params, **start}


def save(path: Path, state: State) -> None:
    """Write all or nothing: a run killed here leaves the checkpoint before this one."""
    partly = path.with_suffix(".partial")
    try:
        with partly.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partly.replace(path)
    finally:
        partly.unlink(missing_ok=True)


def load(path: Path, config: Config) -> State:
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load alone accepts flipped bits in a tensor
            if bad := archive.testzip():
                raise ValueError(f"wrong checksum of {bad}")
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        if missing := fresh(config).keys() - state.keys():
            raise ValueError(f"no {', '.join(sorted(missing))} in it")
        saved = state["config"]
        wrong = [
            f"{k} {saved.get(k)}, not {v}" for k, v in asdict(config).items() if saved.get(k) != v
        ]
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist: start without --resume") from None
    except Exception as error:  # what reading a damaged file raises has no bound
        cure = "delete it and start again without --resume"
        raise SystemExit(f"{path} is damaged ({error}): {cure}") from None
    if wrong:
        raise SystemExit(f"{path} is of another run ({'; '.join(wrong)}): resume with its flags")
    return state


# -- training --------------------------------------------------------------------------------------


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first twentieth, then half a cosine down to 0.1."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def memory(device: torch.device) -> tuple[float, float]:
    """Bytes now and at most: of tensors on a GPU, of the whole process on a CPU (nan: unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    try:  # not getrusage: its maximum counts the process that started this one
        status = Path("/proc/self/status").read_text()
    except OSError:
        return math.nan, math.nan
    kib = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", status))
    return 1024 * float(kib.get("VmRSS", "nan")), 1024 * float(kib.get("VmHWM", "nan"))


def adamw(params: Params, config: Config) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, config.lr, betas=(0.9, 0.95), fused=True)


class CtrlC:
    """Note the first Ctrl-C, so that no step is left half done; the second one acts as ever."""

    pressed = False

    def __enter__(self) -> "CtrlC":
        self.before = signal.signal(signal.SIGINT, self.press)
        return self

    def press(self, *_: object) -> None:
        self.pressed = True
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)


def update(params: Params, optimizer: torch.optim.Optimizer, loss_fn: Loss, batch: Tensor) -> float:
    with precision(batch.device):
        value = loss_fn(params, batch)
    value.backward()
    torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def train(state: State, text: Tensor, device: torch.device, path: Path, compiled: bool) -> State:
    """Take the steps that are left, unless Ctrl-C comes; return the state, which is saved too."""
    config, before = Config(**state["config"]), memory(device)[0]
    params = {k: p.clone().to(device).requires_grad_() for k, p in state["params"].items()}
    optimizer = adamw(params, config)
    if state["optimizer"]:
        optimizer.load_state_dict(state["optimizer"])
    losses, seconds = [*state["losses"]], [*state["seconds"]]
    loss_fn: Loss = partial(loss, config=config)
    if compiled:
        loss_fn = torch.compile(loss_fn, fullgraph=True)

    def now() -> State:
        bare = {k: p.detach() for k, p in params.items()}
        new = {"params": bare, "optimizer": optimizer.state_dict(), "losses": losses}
        return {**state, **new, "seconds": seconds, "memory": memory(device)[1] - before}

    bar = tqdm(total=config.steps, initial=len(losses), dynamic_ncols=True)
    with bar, CtrlC() as ctrl_c:
        while len(losses) < config.steps and not ctrl_c.pressed:
            start = time.perf_counter()
            batch = batch_at(text, len(losses), config, device)
            for group in optimizer.param_groups:
                group["lr"] = config.lr * schedule(len(losses), config.steps)
            losses.append(update(params, optimizer, loss_fn, batch))
            seconds.append(time.perf_counter() - start)
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"the loss is {losses[-1]} in step {len(losses)}")
            rate = config.batch * config.context / statistics.median(seconds[-50:])
            gib = memory(device)[1] / 2**30
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tok/s, {gib:.2f} GiB")
            bar.update()
            if len(losses) % SAVE_EVERY == 0:
                save(path, now())
        save(path, now())
    return now()


# -- results ---------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(params: Params, text: Tensor, config: Config, device: torch.device) -> float:
    with precision(device):
        batches = (batch_at(text, i, config, device) for i in range(16))
        return statistics.mean(loss(params, batch, config=config).item() for batch in batches)


def draw(losses: list[float], held: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")  # not pyplot: no display, no global state
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per byte")
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.axhline(held, color="C1", linestyle="--", label=f"held out, at the end: {held:.3f}")
    axes.legend()
    figure.savefig(path, dpi=120)


def compare(flags: list[str], config: Config, out: Path) -> None:
    """Run both variants, each in its own process: else the peak of one hides the other's.

    Training amplifies rounding: after one ulp of the embedding of a plain run was changed, its
    losses moved by 5e-7 within 10 steps and by 4e-2 within 60, as far as the variants come apart.
    """
    runs = {}
    for name, extra in (("liger", []), ("plain", ["--plain"])):
        kept = [x for x in flags if x != "--compare"]
        command = [sys.executable, __file__, *kept, *extra, "--out", str(out / name)]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"the {name} run failed: {shlex.join(command)}")
        runs[name] = load(out / name / CHECKPOINT, replace(config, functions=name))
    print(f"{'':8}{'last loss':>10}{'seconds':>9}{'ms/step':>9}{'peak MiB':>10}")
    for name, run in runs.items():
        total, typical = sum(run["seconds"]), 1000 * statistics.median(run["seconds"])
        mib = run["memory"] / 2**20
        print(f"{name:8}{run['losses'][-1]:10.4f}{total:9.1f}{typical:9.1f}{mib:10.0f}")
    a, b = runs["liger"], runs["plain"]
    gaps = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]
    gap, name = max(((p - b["params"][k]).abs().max().item(), k) for k, p in a["params"].items())
    print("peak: above what the process held before it trained")
    print(f"largest difference of loss: {max(gaps[:10]):.1e} in 10 steps, {max(gaps):.1e} in all")
    print(f"largest difference of a parameter: {gap:.1e} in {name}")


# -- command line ----------------------------------------------------------------------------------

LIMITS = {
    "steps": (1, 10**9), "batch": (1, 10**6), "context": (2, 2**16),
    "width": (64, 2**16), "layers": (1, 10**3), "seed": (0, 2**31),
}  # fmt: skip


def parse(flags: list[str]) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    for name in LIMITS:
        sizes = f"default {getattr(CPU, name)}, on a GPU {getattr(GPU, name)}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=sizes)
    parser.add_argument(
        "--out", type=Path, default="runs/llama", help="folder that a new run overwrites"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--plain", action="store_true", help="plain torch instead of liger_fn")
    parser.add_argument("--compare", action="store_true", help="run both and report differences")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile(loss, fullgraph=True)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUT")
    args = parser.parse_args(flags)
    if args.compare and (args.plain or args.resume):
        parser.error("--compare runs both variants from the start: drop --plain and --resume")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        low, high = LIMITS[name]
        if not low <= value <= high:
            parser.error(f"--{name} must be from {low} to {high}, got {value}")
    config = replace(GPU if args.device == "cuda" else CPU, **given)
    if config.width % (2 * config.head_width):
        parser.error(f"--width must be a multiple of {2 * config.head_width}, got {config.width}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args, replace(config, functions="plain" if args.plain else "liger")


def main(argv: Sequence[str] | None = None) -> None:
    flags = [*(sys.argv[1:] if argv is None else argv)]
    args, config = parse(flags)
    if args.compare:
        return compare(flags, config, args.out)
    device, path, png = torch.device(args.device), args.out / CHECKPOINT, args.out / "loss.png"
    state = load(path, config) if args.resume else fresh(config)
    text, held = corpus()
    size = sum(p.numel() for p in state["params"].values()) / 1e6
    print(f"{size:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {config}", flush=True)
    try:
        state = train(state, text, device, path, args.compile)
    except torch.OutOfMemoryError:
        raise SystemExit(f"too little memory for --batch {config.batch}: halve it") from None
    losses, params = state["losses"], state["params"]
    if len(losses) < config.steps:
        again = shlex.join(["python", __file__, *(x for x in flags if x != "--resume"), "--resume"])
        print(f"stopped after {len(losses)} steps, saved in {path}; this goes on:\n{again}")
        raise SystemExit(130)
    loss_held = evaluate(params, held, config, device)
    draw(losses, loss_held, png)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, held out {loss_held:.3f} nats per byte")
    print(f"{sum(state['seconds']):.0f} s of training; wrote {path} and {png}\n")
    print(generate(params, b"def ", 200, config))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
