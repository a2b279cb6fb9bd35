"""Training steps of the models of `forebay-bench run models`, in PyTorch: eager and compiled, autocast to bf16.

    python3 models.py [--variant bf16,bf16_compile] [--only unet] [--tiny]

Prints one JSON line for each model and variant, with the shapes of forebay-bench, so that `compare` pairs them.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, shared, positions):
        super().__init__()
        self.features = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.features, bias=False)
        self.value = nn.Linear(width, shared * self.features, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = self.features // 2
        angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-b, a], -1) * self.sin.to(x.dtype)

    def forward(self, x):
        heads = lambda layer: layer(x).unflatten(-1, (-1, self.features)).transpose(1, 2)
        q, k, v = self.rotate(heads(self.query)), self.rotate(heads(self.key)), heads(self.value)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads, shared, hidden, positions):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, shared, positions)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, shared, hidden, positions):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.tokens.weight.data.mul_(0.02)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, shared, hidden, positions) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class BertLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, vocabulary, positions, layers, heads, width, hidden):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.types = nn.Embedding(2, width)
        for table in (self.tokens, self.positions, self.types):
            table.weight.data.mul_(0.02)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads, hidden) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, text, mask):
        x = self.tokens(text) + self.positions.weight[: text.shape[1]] + self.types.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        expert = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.experts = nn.ModuleList(expert() for _ in range(count))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1).transpose(0, 1)
        gates, chosen = scores.topk(2 * tokens.shape[0] // len(self.experts), -1)
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            y = expert(tokens.index_select(0, chosen[k])) * gates[k].unsqueeze(-1)
            out = out.index_add(0, chosen[k], y.to(out.dtype))
        return out.view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    def __init__(self, vocabulary, width, layers, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.tokens.weight.data.mul_(0.02)
        self.blocks = nn.ModuleList(MixtureBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def conv_bn_silu(inputs, outputs, kernel, stride):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Stage(nn.Module):
    def __init__(self, inputs, outputs, count):
        super().__init__()
        half = outputs // 2
        self.down = conv_bn_silu(inputs, outputs, 3, 2)
        self.split = conv_bn_silu(outputs, outputs, 1, 1)
        pair = lambda: nn.Sequential(conv_bn_silu(half, half, 3, 1), conv_bn_silu(half, half, 3, 1))
        self.bottlenecks = nn.ModuleList(pair() for _ in range(count))
        self.join = conv_bn_silu(half * (2 + count), outputs, 1, 1)

    def forward(self, x):
        parts = list(self.split(self.down(x)).chunk(2, 1))
        for pair in self.bottlenecks:
            parts.append(parts[-1] + pair(parts[-1]))
        return self.join(torch.cat(parts, 1))


def backbone(width, counts):
    stages = [Stage(width << k, width << (k + 1), count) for k, count in enumerate(counts)]
    return nn.Sequential(conv_bn_silu(3, width, 3, 2), *stages, nn.Conv2d(width << 4, 85, 1))


class PixelAttention(nn.Module):
    def __init__(self, groups, channels):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        batch, channels = x.shape[:2]
        heads = -(-channels // 64)
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, heads, channels // heads, -1).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(x.shape)
        return x + self.proj(y)


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, attends, groups, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = PixelAttention(groups, outputs) if attends else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.attention(self.shortcut(x) + h)


class UNet(nn.Module):
    def __init__(self, side, channels, groups, lowest):
        super().__init__()
        first, last, time = channels[0], channels[-1], 4 * channels[0]
        half = first // 2
        angles = torch.arange(1000)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], -1))
        self.time = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.stem = nn.Conv2d(3, first, 3, padding=1)
        self.down, self.up = nn.ModuleList(), []
        inputs = first
        for k, outputs in enumerate(channels):
            attends = side >> k <= lowest
            block = lambda i: ResBlock(i, outputs, attends, groups, time)
            resize = nn.Conv2d(outputs, outputs, 3, 2, 1) if k + 1 < len(channels) else None
            self.down.append(nn.ModuleList([block(inputs), block(outputs)] + ([resize] if resize else [])))
            below = channels[k + 1] if k + 1 < len(channels) else outputs
            resize = nn.Conv2d(outputs, outputs, 3, 1, 1) if k > 0 else None
            self.up.append(nn.ModuleList([block(below + outputs), block(2 * outputs)] + ([resize] if resize else [])))
            inputs = outputs
        self.up = nn.ModuleList(self.up[::-1])
        self.middle = nn.ModuleList([ResBlock(last, last, True, groups, time), ResBlock(last, last, False, groups, time)])
        self.norm, self.head = nn.GroupNorm(groups, first), nn.Conv2d(first, 3, 3, padding=1)

    def forward(self, x, steps):
        time = self.time(self.positions[steps])
        x, skips = self.stem(x), []
        for level in self.down:
            for block in level[:2]:
                x = block(x, time)
                skips.append(x)
            for resize in level[2:]:
                x = resize(x)
        for block in self.middle:
            x = block(x, time)
        for level in self.up:
            for block in level[:2]:
                x = block(torch.cat([x, skips.pop()], 1), time)
            for resize in level[2:]:
                x = resize(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(F.silu(self.norm(x)))


class Graph(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, classes if k == 2 else width) for k in range(3))

    def forward(self, x, sources, targets, weights):
        for k, layer in enumerate(self.layers):
            h = layer(x)
            messages = h.index_select(0, sources) * weights.to(h.dtype)
            x = torch.zeros_like(h).index_add(0, targets, messages)
            x = x.relu() if k < 2 else x
        return x


class Lstm(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text):
        return self.head(self.lstm(self.tokens(text))[0].flatten(0, 1))


def decoder(tiny, dev):
    batch, length = (2, 16) if tiny else (8, 1024)
    vocabulary = 128 if tiny else 32000
    net = Decoder(vocabulary, 32, 2, 4, 2, 64, length) if tiny else Decoder(vocabulary, 1024, 16, 16, 4, 2816, length)
    text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(2))
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text).flatten(0, 1), target.flatten())


def bert(tiny, dev):
    batch, length = (4, 16) if tiny else (32, 256)
    vocabulary = 100 if tiny else 30522
    net = Bert(vocabulary, 16, 2, 2, 32, 64) if tiny else Bert(vocabulary, 512, 12, 12, 768, 3072)
    text = torch.randint(1, vocabulary, (batch, length), device=dev)
    rows, positions = torch.arange(batch)[:, None], torch.arange(length)[None]
    mask = (positions < length - rows * 7 % (length // 2)).to(dev)
    classes = (torch.arange(batch) % 2).to(dev)
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text, mask), classes)


def mixture(tiny, dev):
    batch, length = (2, 16) if tiny else (8, 512)
    vocabulary = 128 if tiny else 8192
    net = Mixture(vocabulary, 32, 2, 2) if tiny else Mixture(vocabulary, 768, 4, 12)
    text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(2))
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text).flatten(0, 1), target.flatten())


def linears(tiny, dev):
    batch, width = (4, 16) if tiny else (128, 256)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())][:-1]
    x, y = (torch.randn(batch, width, device=dev) for _ in range(2))
    return f"{batch}x{width}", nn.Sequential(*layers), lambda net: F.mse_loss(net(x).float(), y)


def convnet(tiny, dev):
    batch, side = (2, 32) if tiny else (8, 320)
    net = backbone(4, [1, 1, 1, 1]) if tiny else backbone(16, [1, 2, 2, 1])
    x = torch.rand(batch, 3, side, side, device=dev)
    y = torch.rand(batch, 85, side // 32, side // 32, device=dev)
    return f"{batch}x3x{side}x{side}", net, lambda net: F.binary_cross_entropy_with_logits(net(x).float(), y)


def unet(tiny, dev):
    batch, side = (2, 16) if tiny else (64, 64)
    net = UNet(side, [8, 16, 16], 4, 4) if tiny else UNet(side, [128, 256, 256, 256], 32, 16)
    x, noise = (torch.randn(batch, 3, side, side, device=dev) for _ in range(2))
    steps = torch.randint(0, 1000, (batch,), device=dev)
    return f"{batch}x3x{side}x{side}", net, lambda net: F.mse_loss(net(x, steps).float(), noise)


def graph(tiny, dev):
    nodes, edges, width, classes = (50, 200, 8, 4) if tiny else (20_000, 200_000, 128, 40)
    x = torch.randn(nodes, width, device=dev)
    sources, targets = (torch.randint(0, nodes, (edges,), device=dev) for _ in range(2))
    weights = torch.rand(edges, 1, device=dev)
    y = torch.randint(0, classes, (nodes,), device=dev)
    return f"{nodes}x{edges}x{width}", Graph(width, classes), lambda net: F.cross_entropy(net(x, sources, targets, weights), y)


def lstm(tiny, dev):
    vocabulary, width = (64, 16) if tiny else (10_000, 650)
    batch, steps = (2, 5) if tiny else (64, 70)
    text, target = (torch.randint(0, vocabulary, (steps, batch), device=dev) for _ in range(2))
    return f"{batch}x{steps}", Lstm(vocabulary, width), lambda net: F.cross_entropy(net(text), target.flatten())


MODELS = [decoder, bert, mixture, linears, convnet, unet, graph, lstm]


def measure(build, variant, args):
    dev = torch.device(args.device)
    cuda = dev.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.empty_cache()
    torch.manual_seed(1)
    shape, net, loss_of = build(args.tiny, dev)
    net = net.to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=cuda)
    run = torch.compile(net) if variant.endswith("compile") else net

    def step():
        with torch.autocast(dev.type, dtype=torch.bfloat16):
            loss = loss_of(run)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    sync()
    start = time.perf_counter()
    first = step().item()
    first_ms = (time.perf_counter() - start) * 1e3
    for _ in range(1 if args.tiny else 5):
        step().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 if args.tiny else 20):
        sync()
        start = time.perf_counter()
        last = step().item()
        times.append((time.perf_counter() - start) * 1e3)
    line = dict(
        peer="torch", backend=args.device, bench="models_train", shape=f"{build.__name__} {shape}", dtype="bf16",
        variant=variant, median_ms=statistics.median(times), first_ms=first_ms, first_loss=first, last_loss=last,
        params=sum(p.numel() for p in net.parameters()),
    )
    if cuda:
        line["peak_mem_mb"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="bf16,bf16_compile")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for variant in args.variant.split(","):
        for build in MODELS:
            if args.only and build.__name__ not in args.only.split(","):
                continue
            try:
                measure(build, variant, args)
            except Exception as error:  # The other models still run.
                line = dict(peer="torch", bench="models_train", shape=build.__name__, variant=variant)
                print(json.dumps(line | {"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


if __name__ == "__main__":
    main()
