"""Measures the savings of accumulation, checkpointing and mixed precision in PyTorch: the table of examples/savings.rs.

    python3 benches/peers/savings.py --batch 8 --context 512

Uses the model of the example in plain PyTorch, with unfused attention (length x length scores), the same batch, and AdamW.
Each technique runs in its own process. Prints a Markdown table.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Name: layers, heads, width.
MODELS = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-350m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1.5b": (48, 25, 1600),
}
VOCABULARY = 50257
# Name: micro-batches, recomputed blocks, bf16.
WAYS = {
    "plain": (1, False, False),
    "accumulation 4": (4, False, False),
    "checkpointing": (1, True, False),
    "mixed precision": (1, False, True),
    "all three": (4, True, True),
}


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = torch.softmax(scores.masked_fill(later, float("-inf")), -1).to(v.dtype) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, again):
        super().__init__()
        self.again = again
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text):
        x = F.embedding(text, self.tokens) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.linear(self.norm(x), self.tokens)


def train(args):
    """Runs one technique in its own process; prints one line of JSON."""
    count, again, half = WAYS[args.way]
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(1)
    net = Gpt(*MODELS[args.model], args.context, again).to(device)
    # Fused: PyTorch's fastest implementation.
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=cuda)
    text, following = torch.randint(0, VOCABULARY, (2, args.batch, args.context), device=device)

    def step():
        for x, y in zip(text.chunk(count), following.chunk(count)):
            with torch.autocast(device.type, dtype=torch.bfloat16) if half else contextlib.nullcontext():
                loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    sync()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    sync()
    seconds = (time.perf_counter() - start) / args.steps
    print(json.dumps({
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "tokens": args.batch * args.context / seconds,
    }))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-124m", choices=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", choices=WAYS, help="only this one, as JSON")
    args = parser.parse_args()
    if args.way:
        train(args)
        return 0
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else args.device
    print(f"PyTorch {torch.__version__}, {name}")
    print(f"{args.model}, {args.batch} passages of {args.context} tokens a step, AdamW\n")
    print("| variant | reserved bytes | allocated bytes | tokens/s |")
    print("| --- | ---: | ---: | ---: |")
    failed = 0
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], capture_output=True, text=True)
        if done.returncode:
            failed += 1
            print(f"| {way} | failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]} | - | - |")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"| {way} | {row['reserved']} | {row['allocated']} | {row['tokens']:.0f} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
