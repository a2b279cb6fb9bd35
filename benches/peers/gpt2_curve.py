"""Losses of GPT-2 124M in PyTorch, compared with those of `forebay-bench curve` for equal weights and text.

    forebay-bench curve DIR --device cuda:0
    python3 gpt2_curve.py DIR TEXT          # the text of forebay-bench: tests/data/shakespeare.txt

The effect of bf16 on the losses is measured: PyTorch runs with two attention backends, which differ only in rounding, and in
f32. Exits with 1 if our losses differ from PyTorch's more than twice as much as these differ from each other.
"""
import argparse
import contextlib
import json
import math
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP, RATE, BATCH = 50, 3e-4, 8


def weights(path, device):
    """Reads a safetensors file of f32: the length of a JSON header, the header, then the values."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    read = {}
    for name, t in header.items():
        a, b = t["data_offsets"]
        numbers = torch.frombuffer(bytearray(data[8 + size + a : 8 + size + b]), dtype=torch.float32)
        read[name] = numbers.reshape(t["shape"]).to(device).requires_grad_()
    return read


def gpt(w, x, heads):
    h = w["wte.weight"][x] + w["wpe.weight"][: x.shape[1]]
    width = h.shape[-1]
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))

    def norm(h, name):
        return F.layer_norm(h, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(h, name):
        return F.linear(h, w[f"{name}.weight"].t(), w[f"{name}.bias"])

    for k in range(layers):
        qkv = linear(norm(h, f"h.{k}.ln_1"), f"h.{k}.attn.c_attn")
        q, k_, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.split(width, -1))
        y = F.scaled_dot_product_attention(q, k_, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + linear(y, f"h.{k}.attn.c_proj")
        up = F.gelu(linear(norm(h, f"h.{k}.ln_2"), f"h.{k}.mlp.c_fc"), approximate="tanh")
        h = h + linear(up, f"h.{k}.mlp.c_proj")
    return F.linear(norm(h, "ln_f"), w["wte.weight"])


def losses(folder, text, steps, device, low, attention, heads):
    w = weights(folder / "weights.safetensors", device)
    context = w["wpe.weight"].shape[0]
    opt = torch.optim.AdamW(w.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for step in range(steps):
        starts = [(step * BATCH + row) * context % (len(text) - context - 1) for row in range(BATCH)]
        rows = torch.stack([text[s : s + context + 1] for s in starts]).to(device)
        for group in opt.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, 1.0)
        way = sdpa_kernel(attention) if attention else contextlib.nullcontext()
        with way, torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            logits = gpt(w, rows[:, :-1], heads)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        found.append(loss.detach())
    return [loss.item() for loss in found]


def apart(a, b):
    """Returns the root mean square of the differences, and their maximum."""
    d = [x - y for x, y in zip(a, b)]
    return math.sqrt(sum(x * x for x in d) / len(d)), max(abs(x) for x in d)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=pathlib.Path)
    p.add_argument("text", type=pathlib.Path)
    p.add_argument("--device", default="cuda")
    p.add_argument("--heads", type=int, default=12)
    a = p.parse_args()
    device = torch.device(a.device)
    text = torch.frombuffer(bytearray(a.text.read_bytes()), dtype=torch.uint8).long()
    ours = {f.stem.removeprefix("forebay-"): json.loads(f.read_text()) for f in sorted(a.folder.glob("forebay-*.json"))}
    steps = len(next(iter(ours.values())))
    run = lambda low, attention: losses(a.folder, text, steps, device, low, attention, a.heads)
    torch.manual_seed(1)
    flash, other = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) if device.type == "cuda" else (None, SDPBackend.MATH)
    base = run(True, flash)
    peers = {"torch bf16, other attention": run(True, other), "torch f32": run(False, None)}
    noise = max(apart(base, peer)[0] for peer in peers.values())
    at = sorted({0, 1, 9, 49, 99, 199, steps - 1} & set(range(steps)))
    print("step".ljust(30), *(f"{k + 1:>8}" for k in at), "  apart: rms, most")
    worst = 0.0
    for name, curve in {"torch bf16": base, **peers, **{f"forebay {k}": v for k, v in ours.items()}}.items():
        rms, most = apart(curve, base)
        if name.startswith("forebay"):
            worst = max(worst, rms)
        print(name.ljust(30), *(f"{curve[k]:8.4f}" for k in at), f"  {rms:.5f} {most:.5f}")
    fine = all(map(math.isfinite, base)) and worst <= 2 * noise
    print(f"{'PASS' if fine else 'FAIL'}: forebay is {worst:.5f} from torch bf16, torch's own ways are {noise:.5f} apart")
    sys.exit(0 if fine else 1)


main()
