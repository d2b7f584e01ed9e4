"""Loss against bytes: AdamW with an all-reduce beside the DisTrO family, workers as threads of this process.

A small language model learns the source text of Python's standard library, byte by byte. Each method gets a sweep of
learning rates, then more seeds at its best one. Every run is written to a JSON file as it ends; started again, only
what is missing runs. Bytes are the lengths of the messages that the workers made.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distensor.optim.distro.adamw import DisTrOAdamW
from distensor.optim.distro.demo import DeMo, DisTrO
from distensor.optim.distro.exchange import Exchange
from distensor.optim.distro.local import DiLoCo, SparseLoCo
from distensor.testing.exchange import Meeting, ThreadExchange

VOCABULARY = 128
CONTEXT = 128
WORKERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    width: int
    layers: int
    steps: int
    batch: int = 8
    """Sequences of one worker in a step."""


SIZES = {
    "0.1M": Size(width=64, layers=2, steps=500),
    "0.1M-long": Size(width=64, layers=2, steps=2500),
    "0.8M": Size(width=128, layers=4, steps=500, batch=4),
    "5M": Size(width=256, layers=6, steps=300, batch=4),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Parameter(torch.randn(CONTEXT, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width, size.width // 32) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load_text() -> tuple[Tensor, Tensor]:
    """The modules of the standard library, in the order of their names; every twentieth block of 4 KB is kept apart."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    raw = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clamp(max=VOCABULARY - 1).long()
    pieces = ids[: len(ids) // 4096 * 4096].view(-1, 4096)
    apart = torch.arange(len(pieces)) % 20 == 19
    return pieces[~apart].reshape(-1), pieces[apart].reshape(-1)


def draw(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor) -> float:
    rows = draw(text, 256, torch.Generator().manual_seed(1234))
    losses = [float(loss_of(model, part)) for part in rows.split(64)]
    return sum(losses) / len(losses)


class AllReduce(torch.optim.AdamW):
    """What the others are compared with: the mean gradient, then AdamW. Counts a ring's bytes, 2 a value."""

    def __init__(self, params: Iterator[Tensor], lr: float, exchange: Exchange) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
        self._exchange = exchange
        self.bytes_sent = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        self._exchange.mean(flat)
        for p, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
        self.bytes_sent += int(2 * (WORKERS - 1) / WORKERS * flat.numel() * 2)
        super().step()


Make = Callable[[Sequence[Tensor], float, Exchange], Any]
RATES_ADAM = (1e-3, 2e-3, 4e-3, 8e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    make: Make
    rates: tuple[float, ...]


def distro_adamw(**options: Any) -> Make:
    return lambda params, lr, exchange: DisTrOAdamW(
        params, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, exchange=exchange, **options
    )


METHODS: dict[str, Method] = {
    "adamw": Method(
        make=lambda params, lr, exchange: AllReduce(iter(params), lr, exchange),
        rates=(*RATES_ADAM[:2], 3e-3, 4e-3, 5e-3, *RATES_ADAM[3:]),
    ),
    "distro-adamw-k32": Method(make=distro_adamw(k=32), rates=(1e-3, 2e-3, 4e-3, 8e-3)),
    "distro-adamw-k8": Method(make=distro_adamw(k=8), rates=(1e-3, 2e-3, 4e-3)),
    "distro-adamw-k2": Method(make=distro_adamw(k=2), rates=(5e-4, 1e-3, 2e-3)),
    "distro-adamw-k160-of-16384": Method(make=distro_adamw(k=160, chunk=16384), rates=(5e-3,)),
    "distro-adamw-k38-of-16384": Method(make=distro_adamw(k=38, chunk=16384), rates=(5e-3,)),
    "distro-adamw-k32-delayed": Method(make=distro_adamw(k=32, delay=True), rates=(1e-3, 2e-3, 4e-3)),
    "demo-k32": Method(
        make=lambda params, lr, exchange: DeMo(params, lr=lr, k=32, weight_decay=0.1, exchange=exchange),
        rates=(3e-4, 1e-3, 2e-3),
    ),
    "distro-k32": Method(
        make=lambda params, lr, exchange: DisTrO(params, lr=lr, k=32, weight_decay=0.1, exchange=exchange),
        rates=(3e-4, 1e-3, 2e-3),
    ),
    "diloco-h50": Method(
        make=lambda params, lr, exchange: DiLoCo(
            params, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, every=50, exchange=exchange
        ),
        rates=RATES_ADAM,
    ),
    "sparseloco-h25-k64": Method(
        make=lambda params, lr, exchange: SparseLoCo(
            params, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, every=25, exchange=exchange
        ),
        rates=RATES_ADAM,
    ),
}


def rate_at(step: int, steps: int, peak: float) -> float:
    """Warm-up over a twentieth, then a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def train(method: Method, size: Size, lr: float, seed: int, texts: tuple[Tensor, Tensor]) -> dict[str, float]:
    meeting = Meeting(WORKERS)
    results: list[dict[str, float]] = [{} for _ in range(WORKERS)]
    threads = [
        threading.Thread(target=_work, args=(method, size, lr, seed, texts, rank, meeting, results))
        for rank in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = {result["loss"] for result in results}
    if len(losses) != 1:
        raise RuntimeError(f"the workers' weights differ: validation losses {losses}")
    return results[0]


_making = threading.Lock()


def _work(
    method: Method,
    size: Size,
    lr: float,
    seed: int,
    texts: tuple[Tensor, Tensor],
    rank: int,
    meeting: Meeting,
    results: list[dict[str, float]],
) -> None:
    with _making:  # the seed of a model is the whole process's
        torch.manual_seed(seed)
        model = LanguageModel(size)
    optimizer = method.make(list(model.parameters()), lr, ThreadExchange(rank, meeting))
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, size.steps, lr)
        optimizer.zero_grad()
        loss_of(model, draw(texts[0], size.batch, generator)).backward()
        optimizer.step()
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    results[rank] = {"loss": validation_loss(model, texts[1]), "bytes_sent_a_step": optimizer.bytes_sent / size.steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.1M")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", help="instead of each method's own")
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--results", type=Path, default=Path("build/distro.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[arguments.size]
    if arguments.steps:
        size = replace(size, steps=arguments.steps)
    book = Book(arguments.results)
    texts = load_text()
    for name in arguments.methods:
        method = METHODS[name]

        def run(lr: float, seed: int, name: str = name, method: Method = method) -> dict[str, float]:
            key = f"{arguments.size}/{size.steps}/{name}/{lr:g}/{seed}"
            return book.get(key, lambda: train(method, size, lr, seed, texts))

        for lr in arguments.rates or method.rates:
            run(lr, 0)
        best = book.best_rate(f"{arguments.size}/{size.steps}/{name}")
        losses = [run(best, seed)["loss"] for seed in range(arguments.seeds)]
        sent = run(best, 0)["bytes_sent_a_step"]
        print(
            f"{name:26} lr {best:<7g} loss {sum(losses) / len(losses):.4f} {sorted(losses)} sent {sent:,.0f} B a step"
        )
        sys.stdout.flush()
    return 0


class Book:
    """The results by key, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        if key not in self._all:
            self._all[key] = run()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._all, indent=1) + "\n")
            print(f"  {key}: {self._all[key]}", flush=True)
        return self._all[key]

    def best_rate(self, prefix: str) -> float:
        """The rate with the lowest loss of seed 0, of all that were ever tried."""
        tried = {
            key.split("/")[3]: run["loss"] for key, run in self._all.items() if re.fullmatch(f"{prefix}/[^/]+/0", key)
        }
        return float(min(tried, key=lambda rate: tried[rate]))


if __name__ == "__main__":
    sys.exit(main())
