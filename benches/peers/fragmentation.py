"""Trains as examples/fragmentation.rs does, in PyTorch, under a limit just above the requested bytes.

    python3 benches/peers/fragmentation.py                     # the same model and batches, PyTorch's allocator
    python3 benches/peers/fragmentation.py --sizes frag.json   # exactly the allocations in `fragmentation --memory-snapshot frag.json`

The limit is set by torch.cuda.set_per_process_memory_fraction. PYTORCH_ALLOC_CONF selects another allocator than the
default. The exit status is 0 if memory ran out, as the example predicts.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

UNIT, INPUTS, WIDTH, LAYERS, STEPS, CLASSES = 256, 784, 512, 6, 22, 10
BATCHES = [1, 8, 2, 9, 3, 10, 4, 12, 6, 16, 8]
MIB = 1 << 20


def train(losses):
    """Trains the perceptron, and appends the loss of each step to `losses`."""
    torch.manual_seed(1)
    layers = []
    for layer in range(LAYERS):
        layers += [nn.Linear(INPUTS if layer == 0 else WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    centres = torch.randn(CLASSES, INPUTS, device="cuda")
    for step in range(STEPS):
        rows = UNIT * BATCHES[step % len(BATCHES)]
        y = torch.randint(0, CLASSES, (rows,), device="cuda")
        x = torch.randn(rows, INPUTS, device="cuda") + centres[y]
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del x, y, loss


def replay(path, done):
    """Repeats the allocations and frees of a snapshot, and appends each to `done`."""
    blocks = {}
    for event in json.loads(path.read_text())["events"]:
        if event["action"] == "alloc":
            blocks[event["address"]] = torch.empty(event["requested_size"], dtype=torch.uint8, device="cuda")
        elif event["action"] in ("free", "free_requested"):
            del blocks[event["address"]]
        else:
            continue
        done.append(event)


def attempt(args):
    """Runs in its own process; prints one line of JSON."""
    total = torch.cuda.get_device_properties(0).total_memory
    if args.limit:
        torch.cuda.set_per_process_memory_fraction(args.limit / total)
    done, full = [], None
    try:
        replay(args.sizes, done) if args.sizes else train(done)
    except torch.OutOfMemoryError as error:
        full = str(error).split(". ")[0]
    stats = torch.cuda.memory_stats()
    print(json.dumps({
        "done": len(done),
        "first": None if args.sizes or not done else done[0],
        "last": None if args.sizes or not done else done[-1],
        "full": full,
        "requested": stats["requested_bytes.all.peak"],
        "held": stats["allocated_bytes.all.current"],
        "taken": stats["reserved_bytes.all.peak"],
        "cached": stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"],
    }))


def child(args, limit):
    command = [sys.executable, __file__, "--limit", str(limit)]
    command += ["--sizes", str(args.sizes)] if args.sizes else []
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=pathlib.Path, help="requests to repeat: a snapshot of the example, as JSON")
    parser.add_argument("--slack", type=int, default=10, help="percent above the peak of requested bytes")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limit is not None:
        attempt(args)
        return 0
    free = child(args, 0)
    limit = free["requested"] * (100 + args.slack) // 100
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print(f"peak of requested bytes {free['requested'] / MIB:.1f} MiB; reserved without a limit {free['taken'] / MIB:.1f} MiB")
    tight = child(args, limit)
    what = "requests and frees" if args.sizes else "steps"
    print(f"within {limit / MIB:.1f} MiB, {args.slack} % more: {tight['done']} of {free['done']} {what}")
    if tight["last"] is not None:
        print(f"loss {tight['first']:.3f} to {tight['last']:.3f}")
    if not tight["full"]:
        print(f"the run is complete, and reserved {tight['taken'] / MIB:.1f} MiB")
        return 1
    print(f"out of memory: {tight['full']}")
    print(f"allocated {tight['held'] / MIB:.1f} MiB, free in pieces {tight['cached'] / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
