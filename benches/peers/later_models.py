"""More models of `models.py`: T5, graph attention, large tables, a diffusion transformer, a radiance field and EDSR."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def linear_layers(widths):
    return nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))


def run_layers(layers, x):
    """Runs linear layers with relu between them."""
    for k, layer in enumerate(layers):
        x = layer(x)
        x = F.relu(x) if k + 1 < len(layers) else x
    return x


def position_buckets(length, is_decoder, buckets=32, most=128):
    """Returns the index of each pair's position bias. Half of the biases of an encoder belong to later positions."""
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    if is_decoder:
        count, base, distance = buckets, 0, (-distance).clamp(min=0)
    else:
        count = buckets // 2
        base, distance = (distance > 0).long() * count, distance.abs()
    exact = count // 2
    ratio = torch.log(distance.double().clamp(min=1) / exact) / math.log(most / exact)
    far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
    return base + torch.where(distance < exact, distance, far)


class T5Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width, eps=1e-6)
        linear = lambda: nn.Linear(width, width, bias=False)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()

    def forward(self, x, memory=None, bias=None):
        y = self.norm(x)
        memory = y if memory is None else memory
        heads = lambda layer, x: layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = heads(self.query, y), heads(self.key, memory), heads(self.value, memory)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + self.out(y.transpose(1, 2).flatten(2))


class T5Network(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))


class T5Block(nn.Module):
    def __init__(self, width, heads, hidden, is_decoder):
        super().__init__()
        self.attention = T5Attention(width, heads)
        self.cross = T5Attention(width, heads) if is_decoder else None
        self.network = T5Network(width, hidden)

    def forward(self, x, memory, bias):
        x = self.attention(x, bias=bias)
        if self.cross is not None:
            x = self.cross(x, memory)
        return self.network(x)


class T5Stack(nn.Module):
    def __init__(self, width, heads, hidden, layers, length, is_decoder):
        super().__init__()
        self.position_bias = nn.Embedding(32, heads)
        self.blocks = nn.ModuleList(T5Block(width, heads, hidden, is_decoder) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.register_buffer("buckets", position_buckets(length, is_decoder))
        mask = torch.full((length, length), float("-inf")).triu(1) if is_decoder else None
        self.register_buffer("mask", mask)

    def forward(self, x, memory=None):
        bias = self.position_bias(self.buckets).permute(2, 0, 1).unsqueeze(0)
        bias = bias if self.mask is None else bias + self.mask
        for block in self.blocks:
            x = block(x, memory, bias)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self, vocabulary, width, heads, hidden, layers, sources, targets):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(width, heads, hidden, layers, sources, False)
        self.decoder = T5Stack(width, heads, hidden, layers, targets, True)

    def forward(self, source, text):
        x = self.decoder(self.tokens(text), self.encoder(self.tokens(source)))
        return F.linear(x * x.shape[-1] ** -0.5, self.tokens.weight)


class GraphAttention(nn.Module):
    def __init__(self, inputs, heads, features, concatenates):
        super().__init__()
        self.heads, self.concatenates = heads, concatenates
        self.source, self.target = nn.Linear(inputs, heads * features), nn.Linear(inputs, heads * features)
        self.scorer = nn.Parameter(torch.randn(heads, features) * features ** -0.5)
        self.bias = nn.Parameter(torch.zeros(heads * features if concatenates else features))

    def forward(self, x, sources, targets):
        messages = self.source(x).unflatten(-1, (self.heads, -1)).index_select(0, sources)
        pairs = messages + self.target(x).unflatten(-1, (self.heads, -1)).index_select(0, targets)
        pairs = F.leaky_relu(pairs, 0.2)
        scores = (pairs * self.scorer.to(pairs.dtype)).sum(-1)
        zeros = scores.new_zeros(len(x), self.heads)
        at = targets[:, None].expand_as(scores)
        highest = zeros.scatter_reduce(0, at, scores.detach(), "amax", include_self=False)
        weights = (scores - highest.index_select(0, targets)).exp()
        total = zeros.index_add(0, targets, weights)
        weights = weights / (total.index_select(0, targets) + 1e-16)
        messages = messages * weights.to(messages.dtype).unsqueeze(-1)
        y = messages.new_zeros(len(x), *messages.shape[1:]).index_add(0, targets, messages)
        y = y.flatten(1) if self.concatenates else y.mean(1)
        return y + self.bias.to(y.dtype)


class Gat(nn.Module):
    def __init__(self, width, heads, features, classes):
        super().__init__()
        self.layers = nn.ModuleList([
            GraphAttention(width, heads, features, True),
            GraphAttention(heads * features, heads, features, True),
            GraphAttention(heads * features, heads, classes, False),
        ])

    def forward(self, x, sources, targets):
        for layer in self.layers:
            x = layer(x, sources, targets)
            x = F.elu(x) if layer.concatenates else x
        return x


class Dlrm(nn.Module):
    def __init__(self, tables, entries, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(entries, width, mode="mean") for _ in range(tables))
        self.bottom = linear_layers([13, 512, 256, width])
        self.top = linear_layers([width + (tables + 1) * tables // 2, 512, 512, 256, 1])
        self.register_buffer("below", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense, bags):
        x = F.relu(run_layers(self.bottom, dense))
        rows = [table(index, offsets).to(x.dtype) for table, (index, offsets) in zip(self.tables, bags)]
        features = torch.stack([x] + rows, 1)
        products = (features @ features.transpose(1, 2))[:, self.below[0], self.below[1]]
        return run_layers(self.top, torch.cat([x, products], 1))


def zero_linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def modulate(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (scale.unsqueeze(1) + 1) + shift.unsqueeze(1)


class DitBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.modulation = heads, zero_linear(width, 6 * width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        parts = self.modulation(F.silu(condition)).chunk(6, 1)
        x = x + parts[2].unsqueeze(1) * self.attend(modulate(x, parts[0], parts[1]))
        y = F.gelu(self.up(modulate(x, parts[3], parts[4])), approximate="tanh")
        return x + parts[5].unsqueeze(1) * self.down(y)


class Dit(nn.Module):
    def __init__(self, side, width, heads, layers, frequencies=128):
        super().__init__()
        across, quarter = side // 2, width // 4
        angles = torch.arange(across)[:, None] * 10000.0 ** (-torch.arange(quarter) / quarter)
        table = torch.cat([angles.sin(), angles.cos()], -1)
        rows, columns = table[:, None].expand(-1, across, -1), table[None].expand(across, -1, -1)
        self.register_buffer("positions", torch.cat([rows, columns], -1).flatten(0, 1).unsqueeze(0))
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(frequencies) / frequencies))
        self.patches, self.classes = nn.Conv2d(4, width, 2, 2), nn.Embedding(1001, width)
        self.time = nn.Sequential(nn.Linear(2 * frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.modulation, self.head = zero_linear(width, 2 * width), zero_linear(width, 16)

    def forward(self, x, steps, classes):
        batch, across = len(x), x.shape[2] // 2
        angles = steps.float()[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(classes)
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens, condition)
        y = self.head(modulate(tokens, *self.modulation(F.silu(condition)).chunk(2, 1)))
        y = y.view(batch, across, across, 2, 2, 4).permute(0, 5, 1, 3, 2, 4)
        return y.reshape(x.shape)


def encode(x, powers):
    angles = (x.unsqueeze(-1) * powers).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


class Nerf(nn.Module):
    def __init__(self, width, samples, near=2.0, far=6.0):
        super().__init__()
        self.near, self.far, self.skip = near, far, 5
        points, views = 3 + 2 * 3 * 10, 3 + 2 * 3 * 4
        inputs = [points] + [width] * 7
        inputs[self.skip] += points
        self.layers = nn.ModuleList(nn.Linear(n, width) for n in inputs)
        self.density, self.features = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + views, width // 2), nn.Linear(width // 2, 3)
        self.register_buffer("point_powers", 2.0 ** torch.arange(10))
        self.register_buffer("view_powers", 2.0 ** torch.arange(4))
        self.register_buffer("places", torch.arange(samples).float())

    def field(self, points, views):
        x = points
        for k, layer in enumerate(self.layers):
            x = torch.cat([points, x.to(points.dtype)], -1) if k == self.skip else x
            x = F.relu(layer(x))
        density, features = self.density(x).squeeze(-1).float(), self.features(x)
        y = F.relu(self.view(torch.cat([features, views.to(features.dtype)], -1)))
        return F.relu(density), self.colour(y).float().sigmoid()

    def forward(self, origins, directions):
        rays, samples = len(origins), len(self.places)
        # One random sample in each of equal ranges.
        offsets = torch.rand(rays, samples, device=origins.device)
        depths = (offsets + self.places) * ((self.far - self.near) / samples) + self.near
        points = origins + directions * depths.unsqueeze(-1)
        views = encode(directions, self.view_powers).expand(-1, samples, -1)
        density, colour = self.field(encode(points, self.point_powers), views)
        gaps = depths[:, 1:] - depths[:, :-1]
        gaps = torch.cat([gaps, torch.full((rays, 1), 1e10, device=gaps.device)], 1)
        alpha = 1 - (-(density * gaps)).exp()
        passed = 1 - alpha + 1e-10
        passed = torch.cat([torch.ones(rays, 1, device=passed.device), passed], 1).cumprod(1)
        weights = alpha * passed[:, :samples]
        return (weights.unsqueeze(-1) * colour).sum(1)


class Edsr(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        conv = lambda inputs, outputs: nn.Conv2d(inputs, outputs, 3, padding=1)
        self.stem = conv(3, width)
        block = lambda: nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width))
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.last, self.up, self.head = conv(width, width), conv(width, 4 * width), conv(width, 3)

    def forward(self, x):
        stem = x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.pixel_shuffle(self.up(self.last(x) + stem), 2))


def t5(tiny, dev):
    vocabulary, width, heads, hidden, layers = (64, 16, 2, 24, 2) if tiny else (32_128, 512, 8, 1024, 6)
    batch, sources, targets = (2, 12, 8) if tiny else (32, 256, 128)
    words = lambda length: torch.randint(0, vocabulary, (batch, length), device=dev)
    source, text, target = words(sources), words(targets), words(targets)
    net = T5(vocabulary, width, heads, hidden, layers, sources, targets)
    loss = lambda net: F.cross_entropy(net(source, text).flatten(0, 1), target.flatten())
    return f"{batch}x{sources}x{targets}", net, loss


def gat(tiny, dev):
    nodes, edges, width = (50, 200, 8) if tiny else (20_000, 200_000, 128)
    heads, features, classes = (2, 4, 5) if tiny else (8, 32, 40)
    x = torch.randn(nodes, width, device=dev)
    sources, targets = (torch.randint(0, nodes, (edges,), device=dev) for _ in range(2))
    y = torch.randint(0, classes, (nodes,), device=dev)
    net = Gat(width, heads, features, classes)
    return f"{nodes}x{edges}x{heads}x{features}", net, lambda net: F.cross_entropy(net(x, sources, targets), y)


def dlrm(tiny, dev):
    batch, tables, entries, width = (4, 3, 20, 8) if tiny else (4096, 26, 100_000, 64)
    dense = torch.rand(batch, 13, device=dev)
    bags = []
    for table in range(tables):
        # Bags of 1 to 10 samples.
        ends = ((torch.arange(batch) * 7 + table * 3) % 10 + 1).cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]]).to(dev)
        bags.append((torch.randint(0, entries, (int(ends[-1]),), device=dev), offsets))
    clicked = torch.randint(0, 2, (batch, 1), device=dev).float()
    loss = lambda net: F.binary_cross_entropy_with_logits(net(dense, bags).float(), clicked)
    return f"{batch}x{tables}x{entries}", Dlrm(tables, entries, width), loss


def dit(tiny, dev):
    batch, side, width, heads, layers = (2, 8, 16, 2, 2) if tiny else (128, 32, 384, 6, 12)
    x, noise = (torch.randn(batch, 4, side, side, device=dev) for _ in range(2))
    steps, classes = (torch.randint(0, 1000, (batch,), device=dev) for _ in range(2))
    loss = lambda net: F.mse_loss(net(x, steps, classes).float(), noise)
    return f"{batch}x4x{side}x{side}", Dit(side, width, heads, layers), loss


def nerf(tiny, dev):
    rays, samples, width = (4, 8, 16) if tiny else (2048, 64, 256)
    origins, directions = (torch.randn(rays, 1, 3, device=dev) for _ in range(2))
    directions = directions / directions.square().sum(-1, keepdim=True).sqrt()
    y = torch.rand(rays, 3, device=dev)
    return f"{rays}x{samples}", Nerf(width, samples), lambda net: F.mse_loss(net(origins, directions), y)


def edsr(tiny, dev):
    batch, side, width, count = (2, 8, 4, 2) if tiny else (16, 96, 64, 16)
    x, y = torch.rand(batch, 3, side, side, device=dev), torch.rand(batch, 3, 2 * side, 2 * side, device=dev)
    return f"{batch}x3x{side}x{side}", Edsr(width, count), lambda net: F.l1_loss(net(x).float(), y)


LATER_MODELS = [t5, gat, dlrm, dit, nerf, edsr]
