"""Training steps of the models of `forebay-bench run models`, in PyTorch: eager and compiled, autocast to bf16.

    python3 models.py [--variant bf16,bf16_compile] [--only unet] [--tiny] [--lock FILE]

Prints one JSON line for each model and variant, with the shapes of forebay-bench, so that `compare` pairs them.
"""

import argparse
import fcntl
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from later_models import LATER_MODELS, linear_layers, run_layers
from more_models import MORE_MODELS
from newer_models import NEWER_MODELS


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
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.dropout(self.out(y)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(self, vocabulary, positions, layers, heads, width, hidden):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.types = nn.Embedding(2, width)
        for table in (self.tokens, self.positions, self.types):
            table.weight.data.mul_(0.02)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, heads, hidden) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, text, mask):
        x = self.tokens(text) + self.positions.weight[: text.shape[1]] + self.types.weight[0]
        x = self.dropout(self.norm(x))
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


class DepthwiseBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.filter = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x):
        y = self.filter(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        return x + (y * self.scale.to(y.dtype)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self, widths, counts):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, 4)
        blocks = lambda width, count: nn.Sequential(*(DepthwiseBlock(width) for _ in range(count)))
        self.stages = nn.ModuleList(blocks(width, count) for width, count in zip(widths, counts))
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in zip(widths, widths[1:]))
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x):
        x = self.stem(x)
        for k, stage in enumerate(self.stages):
            x = stage(self.downs[k - 1](x) if k else x)
        return self.head(x.mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        hidden = 6 * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.layers(x)
        return x + y if self.is_residual else y


class MobileNet(nn.Module):
    def __init__(self, inputs, stages):
        super().__init__()
        self.stem = nn.Conv2d(3, inputs, 3, 2, 1)
        blocks = []
        for outputs, count, stride in stages:
            for k in range(count):
                blocks.append(InvertedResidual(inputs, outputs, stride if k == 0 else 1))
                inputs = outputs
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, 1000)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Autoencoder(nn.Module):
    def __init__(self, side, widths, latent):
        super().__init__()
        self.low = side >> len(widths)
        features = widths[-1] * self.low * self.low
        down = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
        up = lambda a, b: nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
        self.down = nn.Sequential(*(down(a, b) for a, b in zip([3, *widths], widths)))
        self.moments, self.start = nn.Linear(features, 2 * latent), nn.Linear(latent, features)
        self.up = nn.Sequential(*(up(a, b) for a, b in zip(widths[::-1], [*widths[-2::-1], 32])))
        self.end = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x):
        mean, log_variance = self.moments(self.down(x).flatten(1)).float().chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        h = self.start(z)
        image = self.end(self.up(h.view(len(h), -1, self.low, self.low))).float().sigmoid()
        divergence = (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.mse_loss(image, x) - 0.5e-3 * divergence


class Translator(nn.Module):
    def __init__(self, vocabulary, width, heads, layers):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        options = dict(dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, **options) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, heads, **options) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source, text):
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(text)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(x.flatten(0, 1))


class Audio(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        dilation = lambda k: 1 << (k % 8)
        self.filters = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=dilation(k), dilation=dilation(k)) for k in range(count)
        )
        self.points = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for gated, point in zip(self.filters, self.points):
            a, b = gated(x).chunk(2, 1)
            x = x + point(a.tanh() * b.sigmoid())
        return self.head(x)


class Recommender(nn.Module):
    def __init__(self, tables, entries, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(entries, width, mode="sum") for _ in range(tables))
        self.bottom = linear_layers([13, 512, 256, width])
        self.top = linear_layers([width + (tables + 1) * tables // 2, 512, 256, 1])
        below = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("chosen", below[0] * (tables + 1) + below[1])

    def forward(self, dense, bags):
        x = F.relu(run_layers(self.bottom, dense))
        rows = torch.stack([x] + [table(bag).to(x.dtype) for table, bag in zip(self.tables, bags)], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1).index_select(1, self.chosen)
        return run_layers(self.top, torch.cat([x, products], 1))


class VolumeNet(nn.Module):
    def __init__(self, widths):
        super().__init__()
        conv = lambda k, a, b: nn.Sequential(
            nn.Conv3d(a, b, 3, 1 + k % 2, 1, bias=False), nn.BatchNorm3d(b), nn.ReLU()
        )
        self.layers = nn.Sequential(*(conv(k, a, b) for k, (a, b) in enumerate(zip(widths, widths[1:]))))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3, 4)))


class Block(nn.Module):
    """Block of Swin, with attention as in timm."""
    def __init__(self, width, heads, size, side, is_shifted):
        super().__init__()
        self.heads, self.side = heads, side
        self.shift = side // 2 if is_shifted and size > side else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) * 0.02)
        at = torch.arange(side * side)
        y, x = (at[:, None] // side - at[None] // side, at[:, None] % side - at[None] % side)
        self.register_buffer("index", ((y + side - 1) * (2 * side - 1) + x + side - 1).flatten())
        mask = None
        if self.shift:
            part = (torch.arange(size) >= size - side).long() + (torch.arange(size) >= size - self.shift).long()
            regions = self.partition((3 * part[:, None] + part[None])[None, :, :, None]).squeeze(-1)
            mask = (regions[:, :, None] != regions[:, None]).float() * -100.0
        self.register_buffer("mask", mask)

    def partition(self, x):
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // self.side, self.side, width // self.side, self.side, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.side * self.side, channels)

    def attend(self, x):
        windows, pixels, width = x.shape
        q, k, v = self.qkv(x).reshape(windows, pixels, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias[self.index].view(pixels, pixels, self.heads).permute(2, 0, 1)[None]
        if self.mask is not None:
            count = len(self.mask)
            mask = self.mask.view(1, count, 1, pixels, pixels).expand(windows // count, -1, self.heads, -1, -1)
            bias = bias + mask.reshape(-1, self.heads, pixels, pixels)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(windows, pixels, width))

    def forward(self, x):
        batch, height, width, channels = x.shape
        y = self.norm1(x)
        if self.shift:
            y = y.roll((-self.shift, -self.shift), (1, 2))
        y = self.attend(self.partition(y))
        y = y.view(batch, height // self.side, width // self.side, self.side, self.side, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PatchMerging(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    def __init__(self, side, window, first, counts):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, first, 4, 4), nn.LayerNorm(first)
        block = lambda k, j: Block(first << k, max(first // 32, 1) << k, side // 4 >> k, window, j % 2 == 1)
        self.stages = nn.ModuleList(nn.Sequential(*(block(k, j) for j in range(n))) for k, n in enumerate(counts))
        self.merges = nn.ModuleList(PatchMerging(first << k) for k in range(len(counts) - 1))
        last = first << (len(counts) - 1)
        self.norm, self.head = nn.LayerNorm(last), nn.Linear(last, 1000)

    def forward(self, x):
        x = self.stem_norm(self.stem(x).permute(0, 2, 3, 1))
        for k, stage in enumerate(self.stages):
            x = stage(self.merges[k - 1](x) if k else x)
        return self.head(self.norm(x).mean((1, 2)))


class Gan(nn.Module):
    """DCGAN."""
    def __init__(self, latent, widths):
        super().__init__()
        up = lambda a, b: [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        down = lambda a, b: [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        layers = [nn.ConvTranspose2d(latent, widths[-1], 4, bias=False), nn.BatchNorm2d(widths[-1]), nn.ReLU()]
        for a, b in zip(widths[::-1], widths[-2::-1]):
            layers += up(a, b)
        self.generator = nn.Sequential(*layers, nn.ConvTranspose2d(widths[0], 3, 4, 2, 1, bias=False), nn.Tanh())
        layers = [nn.Conv2d(3, widths[0], 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for a, b in zip(widths, widths[1:]):
            layers += down(a, b)
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, bias=False), nn.Flatten(0))


class Speech(nn.Module):
    def __init__(self, bands, channels, hidden, classes):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, channels, 3, (2, 2), 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, (1, 2), 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        )
        self.gru = nn.GRU(channels * bands // 4, hidden, 3, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        x, _ = self.gru(self.front(x).permute(2, 0, 1, 3).flatten(2))
        return self.head(x).log_softmax(-1)


class StateSpace(nn.Module):
    """Layer of Mamba-2, by sums within and between chunks."""
    def __init__(self, width, head, state, chunk):
        super().__init__()
        inner = 2 * width
        heads, filtered = inner // head, inner + 2 * state
        self.sizes, self.heads, self.state, self.chunk = (inner, filtered, heads), heads, state, chunk
        self.norm, self.gate_norm = nn.RMSNorm(width), nn.RMSNorm(inner)
        self.inputs = nn.Linear(width, inner + filtered + heads, bias=False)
        self.filter = nn.Conv1d(filtered, filtered, 4, padding=3, groups=filtered)
        self.decay_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.step_bias = nn.Parameter(torch.full((heads,), -4.6))
        self.skip = nn.Parameter(torch.ones(heads, 1))
        self.outputs = nn.Linear(inner, width, bias=False)

    def scan(self, x, decay, writes, reads):
        batch, length, heads, elements = x.shape
        chunk, state, chunks = self.chunk, self.state, length // self.chunk
        x = x.view(batch, chunks, chunk, heads, elements).transpose(2, 3)
        sums = decay.view(batch, chunks, chunk, heads).transpose(2, 3).cumsum(-1)
        writes = writes.reshape(batch, chunks, 1, chunk, state)
        reads = reads.reshape(batch, chunks, 1, chunk, state)
        above = lambda n, diagonal: torch.ones(n, n, device=x.device).triu(diagonal).bool()
        weights = sums.unsqueeze(-1) - sums.unsqueeze(-2)
        weights = weights.masked_fill(above(chunk, 1), -torch.inf).exp()
        inside = (reads @ writes.transpose(-2, -1) * weights) @ x
        totals = sums[..., -1:]
        states = writes.transpose(-2, -1) @ (x * (totals - sums).exp().unsqueeze(-1))
        totals = totals.squeeze(-1).transpose(1, 2)
        ends = totals.cumsum(-1)
        between = (ends - totals).unsqueeze(-1) - ends.unsqueeze(-2)
        between = between.masked_fill(above(chunks, 0), -torch.inf).exp()
        states = between @ states.transpose(1, 2).flatten(3)
        states = states.view(batch, heads, chunks, state, elements).transpose(1, 2)
        before = (reads @ states) * sums.exp().unsqueeze(-1)
        return (inside + before).transpose(2, 3).reshape(batch, length, heads, elements)

    def forward(self, input):
        inner = self.sizes[0]
        gate, filtered, step = self.inputs(self.norm(input)).split(self.sizes, -1)
        filtered = self.filter(filtered.transpose(1, 2))[..., : input.shape[1]]
        x, writes, reads = F.silu(filtered).transpose(1, 2).split((inner, self.state, self.state), -1)
        x = x.unflatten(-1, (self.heads, -1))
        step = F.softplus(step + self.step_bias)
        y = self.scan(x * step.unsqueeze(-1), step * -self.decay_log.exp(), writes, reads)
        y = (y + x * self.skip).flatten(2)
        return input + self.outputs(self.gate_norm(y * F.silu(gate)))


class StateSpaces(nn.Module):
    def __init__(self, width, layers, head, state, chunk):
        super().__init__()
        self.layers = nn.Sequential(*(StateSpace(width, head, state, chunk) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return self.head(self.norm(self.layers(x)))


class GatedResidual(nn.Module):
    def __init__(self, inputs, outputs, expansion, kernel, stride):
        super().__init__()
        hidden, squeezed = expansion * inputs, max(inputs // 4, 1)
        self.expand = conv_bn_silu(inputs, hidden, 1, 1) if expansion > 1 else nn.Identity()
        self.filter = nn.Sequential(
            nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden), nn.SiLU(),
        )
        self.squeeze, self.excite = nn.Conv2d(hidden, squeezed, 1), nn.Conv2d(squeezed, hidden, 1)
        self.project = nn.Sequential(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.filter(self.expand(x))
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        y = self.project(y)
        return x + y if self.is_residual else y


class EfficientNet(nn.Module):
    def __init__(self, stages, first, last):
        super().__init__()
        self.stem, blocks, inputs = conv_bn_silu(3, first, 3, 2), [], first
        for expansion, kernel, stride, outputs, count in stages:
            for k in range(count):
                blocks.append(GatedResidual(inputs, outputs, expansion, kernel, stride if k == 0 else 1))
                inputs = outputs
        self.blocks, self.last = nn.Sequential(*blocks), conv_bn_silu(inputs, last, 1, 1)
        self.head = nn.Linear(last, 1000)

    def forward(self, x):
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


class EdgeConv(nn.Module):
    def __init__(self, inputs, outputs, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.conv, self.norm = nn.Conv2d(2 * inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x):
        batch, points, channels = x.shape
        nearest = torch.cdist(x, x).topk(self.neighbours, -1, largest=False)[1]
        rows = (nearest + torch.arange(batch, device=x.device)[:, None, None] * points).flatten()
        near = x.flatten(0, 1).index_select(0, rows).view(batch, points, self.neighbours, channels)
        own = x.unsqueeze(2).expand_as(near)
        edges = torch.cat([near - own, own], -1).permute(0, 3, 1, 2)
        return F.leaky_relu(self.norm(self.conv(edges)), 0.2).amax(-1).transpose(1, 2)


class Points(nn.Module):
    def __init__(self, neighbours, widths, joined, hidden):
        super().__init__()
        self.edges = nn.ModuleList(EdgeConv(a, b, neighbours) for a, b in zip([3, *widths], widths))
        self.join, self.join_norm = nn.Conv1d(sum(widths), joined, 1, bias=False), nn.BatchNorm1d(joined)
        widths = [2 * joined, *hidden, 40]
        self.head = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.head_norms = nn.ModuleList(nn.BatchNorm1d(width) for width in hidden)

    def forward(self, x):
        parts = []
        for edge in self.edges:
            x = edge(x)
            parts.append(x)
        x = F.leaky_relu(self.join_norm(self.join(torch.cat(parts, -1).transpose(1, 2))), 0.2)
        x = torch.cat([x.amax(-1), x.mean(-1)], 1)
        for layer, norm in zip(self.head, self.head_norms):
            x = F.leaky_relu(norm(layer(x)), 0.2)
        return self.head[-1](x)


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


def images(tiny, dev, batch=64, side=224, classes=1000):
    batch, side = (2, 16) if tiny else (batch, side)
    x, y = torch.randn(batch, 3, side, side, device=dev), torch.randint(0, classes, (batch,), device=dev)
    return f"{batch}x3x{side}x{side}", x, y


def convnext(tiny, dev):
    shape, x, y = images(tiny, dev)
    net = ConvNext([4, 8], [1, 1]) if tiny else ConvNext([96, 192, 384, 768], [3, 3, 9, 3])
    return shape, net, lambda net: F.cross_entropy(net(x), y)


def mobilenet(tiny, dev):
    shape, x, y = images(tiny, dev)
    stages = [[16, 1, 1], [24, 2, 2], [32, 3, 2], [64, 4, 2], [96, 3, 1], [160, 3, 2], [320, 1, 1]]
    net = MobileNet(4, [[8, 2, 2]]) if tiny else MobileNet(32, stages)
    return shape, net, lambda net: F.cross_entropy(net(x), y)


def autoencoder(tiny, dev):
    shape, x, _ = images(tiny, dev, 128, 64)
    net = Autoencoder(16, [4, 8], 4) if tiny else Autoencoder(64, [64, 128, 256, 512], 128)
    return shape, net, lambda net: net(x.sigmoid())


def translator(tiny, dev):
    batch, length, width, heads, layers, vocabulary = (2, 8, 16, 2, 1, 50) if tiny else (64, 128, 512, 8, 6, 16_000)
    source, text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(3))
    net = Translator(vocabulary, width, heads, layers)
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(source, text), target.flatten())


def audio(tiny, dev):
    batch, length, width, count = (2, 32, 4, 2) if tiny else (8, 8192, 128, 16)
    x, y = (torch.randn(batch, 1, length, device=dev) for _ in range(2))
    return f"{batch}x{length}", Audio(width, count), lambda net: F.mse_loss(net(x).float(), y)


def recommender(tiny, dev):
    batch, tables, entries, width, per_bag = (4, 3, 20, 8, 2) if tiny else (4096, 26, 20_000, 64, 4)
    dense = torch.rand(batch, 13, device=dev)
    bags = [torch.randint(0, entries, (batch, per_bag), device=dev) for _ in range(tables)]
    clicked = torch.randint(0, 2, (batch, 1), device=dev).float()
    loss = lambda net: F.binary_cross_entropy_with_logits(net(dense, bags).float(), clicked)
    return f"{batch}x{tables}x{entries}", Recommender(tables, entries, width), loss


def volume(tiny, dev):
    batch, side = (2, 8) if tiny else (8, 64)
    x, y = torch.randn(batch, 1, side, side, side, device=dev), torch.randint(0, 10, (batch,), device=dev)
    net = VolumeNet([1, 4, 4] if tiny else [1, 32, 32, 64, 64, 128, 128])
    return f"{batch}x1x{side}x{side}x{side}", net, lambda net: F.cross_entropy(net(x), y)


def swin(tiny, dev):
    batch, side = (2, 32) if tiny else (64, 224)
    x, y = torch.randn(batch, 3, side, side, device=dev), torch.randint(0, 1000, (batch,), device=dev)
    net = Swin(32, 4, 8, [2, 2]) if tiny else Swin(224, 7, 96, [2, 2, 6, 2])
    return f"{batch}x3x{side}x{side}", net, lambda net: F.cross_entropy(net(x), y)


def dcgan(tiny, dev):
    shape, x, _ = images(tiny, dev, 128, 64)
    batch, latent = len(x), 4 if tiny else 100
    x = 2 * torch.rand_like(x) - 1
    real, fake = torch.ones(batch, device=dev), torch.zeros(batch, device=dev)

    def make_step(net, new_optimizer, wrap):
        generator, discriminator = wrap(net.generator), wrap(net.discriminator)
        train_g, train_d = new_optimizer(net.generator), new_optimizer(net.discriminator)
        loss_of = lambda image, label: F.binary_cross_entropy_with_logits(discriminator(image).float(), label)

        def step():
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                generated = generator(torch.randn(batch, latent, 1, 1, device=dev))
                loss_d = loss_of(x, real) + loss_of(generated.detach(), fake)
            loss_d.backward()
            train_d.step()
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                loss_g = loss_of(generated, real)
            loss_g.backward()
            train_g.step()
            train_g.zero_grad(set_to_none=True)
            # The generator's loss left gradients in the discriminator too.
            train_d.zero_grad(set_to_none=True)
            return loss_d.detach() + loss_g.detach()

        return step

    return shape, Gan(latent, [4, 8] if tiny else [64, 128, 256, 512]), make_step


dcgan.has_own_step = True


def speech(tiny, dev):
    batch, frames, bands, channels, hidden, labels, classes = (
        (2, 16, 8, 4, 8, 3, 5) if tiny else (32, 400, 80, 32, 512, 40, 29)
    )
    x = torch.randn(batch, 1, frames, bands, device=dev)
    text = torch.randint(1, classes, (batch, labels), device=dev)
    lengths = lambda most: (most - torch.arange(batch) * 7 % (most // 2)).to(dev)
    steps, counts = lengths(frames // 2), lengths(labels)
    net = Speech(bands, channels, hidden, classes)
    return f"{batch}x{frames}x{bands}", net, lambda net: F.ctc_loss(net(x), text, steps, counts)


def statespace(tiny, dev):
    batch, length, width = (2, 16, 8) if tiny else (8, 1024, 512)
    x, y = (torch.randn(batch, length, width, device=dev) for _ in range(2))
    net = StateSpaces(width, 2, 4, 4, 4) if tiny else StateSpaces(width, 6, 64, 64, 64)
    return f"{batch}x{length}x{width}", net, lambda net: F.mse_loss(net(x).float(), y)


def efficientnet(tiny, dev):
    shape, x, y = images(tiny, dev)
    stages = [
        [1, 3, 1, 16, 1], [6, 3, 2, 24, 2], [6, 5, 2, 40, 2], [6, 3, 2, 80, 3],
        [6, 5, 1, 112, 3], [6, 5, 2, 192, 4], [6, 3, 1, 320, 1],
    ]
    net = EfficientNet([[1, 3, 1, 4, 1], [6, 5, 2, 8, 2]], 4, 16) if tiny else EfficientNet(stages, 32, 1280)
    return shape, net, lambda net: F.cross_entropy(net(x), y)


def points(tiny, dev):
    batch, count = (2, 16) if tiny else (16, 1024)
    x, y = torch.randn(batch, count, 3, device=dev), torch.randint(0, 40, (batch,), device=dev)
    net = Points(4, [4, 8], 8, [8]) if tiny else Points(20, [64, 64, 128, 256], 1024, [512, 256])
    return f"{batch}x{count}", net, lambda net: F.cross_entropy(net(x), y)


MODELS = [
    decoder, bert, mixture, linears, convnet, unet, graph, lstm,
    convnext, mobilenet, autoencoder, translator, audio, recommender, volume,
    swin, dcgan, speech, statespace, efficientnet, points, *LATER_MODELS, *NEWER_MODELS, *MORE_MODELS,
]


def measure(build, variant, args):
    dev = torch.device(args.device)
    cuda = dev.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    # Closing the file, also after an error, releases the lock.
    lock_file = open(args.lock, "w") if args.lock else None
    lock = lambda kind: lock_file and fcntl.flock(lock_file, kind)
    lock(fcntl.LOCK_SH)
    if cuda:
        torch.cuda.empty_cache()
    torch.manual_seed(1)
    shape, net, loss_of = build(args.tiny, dev)
    net = net.to(dev)
    new_optimizer = lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4, fused=cuda)
    wrap = torch.compile if variant.endswith("compile") else lambda net: net

    def make_step(net, new_optimizer, wrap):
        run, opt = wrap(net), new_optimizer(net)

        def step():
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                loss = loss_of(run)
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    # A model with several optimisers has a step of its own.
    step = (loss_of if getattr(build, "has_own_step", False) else make_step)(net, new_optimizer, wrap)
    sync()
    start = time.perf_counter()
    first = step().item()
    first_ms = (time.perf_counter() - start) * 1e3
    for _ in range(1 if args.tiny else 5):
        step().item()
    lock(fcntl.LOCK_EX)
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
    parser.add_argument("--lock", default="", help="file: processes compile side by side, and time their steps alone")
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
