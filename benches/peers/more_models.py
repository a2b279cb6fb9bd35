"""More models of `models.py`, for operations that the others have few of: gathers, sorts, segments, windows, groups."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class GmlpBlock(nn.Module):
    def __init__(self, positions, width, hidden):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.gate_norm, self.gate = nn.LayerNorm(hidden // 2), nn.Linear(positions, positions)
        self.down = nn.Linear(hidden // 2, width)
        nn.init.normal_(self.gate.weight, std=1e-3)
        nn.init.ones_(self.gate.bias)

    def forward(self, x):
        u, v = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        v = self.gate(self.gate_norm(v).transpose(1, 2)).transpose(1, 2)
        return x + self.down(u * v)


class Gmlp(nn.Module):
    def __init__(self, side, patch, width, hidden, layers):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        positions = (side // patch) ** 2
        self.blocks = nn.Sequential(*(GmlpBlock(positions, width, hidden) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.down(self.dropout(F.silu(self.up(self.norm(x))))))


class RelativeAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.dropout = heads, nn.LayerNorm(width), nn.Dropout(0.1)
        linear = lambda: nn.Linear(width, width)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.distance = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.distance_bias = nn.Parameter(torch.zeros(heads, width // heads))

    @staticmethod
    def shift(scores):
        batch, heads, n, distances = scores.shape
        rows = F.pad(scores, (1, 0)).view(batch, heads, distances + 1, n)[:, :, 1:]
        return rows.view(batch, heads, n, distances)[..., :n]

    def forward(self, x, positions):
        x = self.norm(x)
        split = lambda t: t.unflatten(-1, (self.heads, -1))
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        p = split(self.distance(positions)).permute(1, 2, 0)
        by_content = (q + self.content_bias).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        by_distance = self.shift((q + self.distance_bias).transpose(1, 2) @ p)
        scores = (by_content + by_distance) * q.shape[-1] ** -0.5
        y = self.dropout(scores.softmax(-1)) @ v.transpose(1, 2)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class ConvolutionModule(nn.Module):
    def __init__(self, width, kernel):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.filter = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.filter_norm, self.point = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = F.glu(self.gate(self.norm(x).transpose(1, 2)), 1)
        y = F.silu(self.filter_norm(self.filter(y)))
        return self.dropout(self.point(y).transpose(1, 2))


class ConformerBlock(nn.Module):
    def __init__(self, width, heads, kernel):
        super().__init__()
        self.first, self.attention = FeedForward(width), RelativeAttention(width, heads)
        self.convolution, self.second = ConvolutionModule(width, kernel), FeedForward(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, positions):
        x = x + self.first(x) * 0.5
        x = x + self.attention(x, positions)
        x = x + self.convolution(x)
        return self.norm(x + self.second(x) * 0.5)


class Conformer(nn.Module):
    def __init__(self, steps, bands, width, heads, kernel, layers, classes):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)])
        self.start, self.dropout = nn.Linear(width * bands // 4, width), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, kernel) for _ in range(layers))
        self.head = nn.Linear(width, classes)
        distances = torch.arange(steps - 1, -steps, -1).float()
        angles = distances[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        x = self.dropout(self.start(x.transpose(1, 2).flatten(2)))
        for block in self.blocks:
            x = block(x, self.positions)
        return self.head(x).log_softmax(-1).transpose(0, 1)


class VitBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mae(nn.Module):
    def __init__(self, side, patch, wide, narrow, counts):
        super().__init__()
        self.patch, self.cells = patch, side // patch
        count = self.cells**2
        token = lambda width: nn.Parameter(0.02 * torch.randn(1, 1, width))
        positions = lambda width: 0.02 * torch.randn(1, count + 1, width)
        self.patches = nn.Conv2d(3, wide[0], patch, patch)
        self.class_token, self.mask = token(wide[0]), token(narrow[0])
        self.encoder = nn.Sequential(*(VitBlock(*wide) for _ in range(counts[0])))
        self.norm, self.start = nn.LayerNorm(wide[0]), nn.Linear(wide[0], narrow[0])
        self.decoder = nn.Sequential(*(VitBlock(*narrow) for _ in range(counts[1])))
        self.last_norm, self.head = nn.LayerNorm(narrow[0]), nn.Linear(narrow[0], patch * patch * 3)
        self.register_buffer("first", positions(wide[0]))
        self.register_buffer("second", positions(narrow[0]))

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2) + self.first[:, 1:]
        batch, count, width = y.shape
        kept = count // 4
        gather = lambda t, index: t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[-1]))
        # A random order, whose first quarter stays.
        order = torch.rand(batch, count, device=x.device).argsort(1)
        restore = order.argsort(1)
        y = gather(y, order[:, :kept])
        y = torch.cat([(self.class_token + self.first[:, :1]).to(y.dtype).expand(batch, -1, -1), y], 1)
        y = self.start(self.norm(self.encoder(y)))
        # Masks stand for the others, and all return to their places.
        masks = self.mask.to(y.dtype).expand(batch, count - kept, -1)
        y = torch.cat([y[:, :1], gather(torch.cat([y[:, 1:], masks], 1), restore)], 1) + self.second
        y = self.head(self.last_norm(self.decoder(y)))[:, 1:].float()
        # Pixels of each patch, normalised by the patch.
        pixels = x.reshape(batch, 3, self.cells, self.patch, self.cells, self.patch).permute(0, 2, 4, 3, 5, 1)
        pixels = pixels.reshape(batch, count, -1)
        var, mean = torch.var_mean(pixels, -1, keepdim=True)
        loss = (y - (pixels - mean) / (var + 1e-6).sqrt()).square().mean(-1)
        masked = (restore >= kept).float()
        return (loss * masked).sum() / masked.sum()


class VqBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width // 4, 3, padding=1, bias=False)
        self.point = nn.Conv2d(width // 4, width, 1, bias=False)

    def forward(self, x):
        return x + self.point(F.relu(self.conv(F.relu(x))))


class Codebook(nn.Module):
    def __init__(self, count, features, decay=0.99):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(count, features))
        self.register_buffer("counts", torch.ones(count))
        self.register_buffer("sums", self.codes.clone())

    @torch.no_grad()
    def forward(self, x):
        count = len(self.codes)
        chosen = torch.cdist(x, self.codes).argmin(-1)
        quantized = F.embedding(chosen, self.codes)
        one_hot = F.one_hot(chosen, count).float()
        self.counts.lerp_(one_hot.sum(0), 1 - self.decay)
        self.sums.lerp_((one_hot.t() @ x).float(), 1 - self.decay)
        # Codes that nothing chose have a small count.
        total = self.counts.sum()
        smoothed = (self.counts + 1e-5) * (total / (total + count * 1e-5))
        self.codes.copy_(self.sums / smoothed.unsqueeze(1))
        return quantized


class VqVae(nn.Module):
    def __init__(self, width, features, codes):
        super().__init__()
        half = width // 2
        self.down = nn.Sequential(
            nn.Conv2d(3, half, 4, 2, 1), nn.ReLU(), nn.Conv2d(half, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), VqBlock(width), VqBlock(width), nn.ReLU(), nn.Conv2d(width, features, 1),
        )
        self.codebook = Codebook(codes, features)
        self.up = nn.Sequential(
            nn.Conv2d(features, width, 3, 1, 1), VqBlock(width), VqBlock(width), nn.ReLU(),
            nn.ConvTranspose2d(width, half, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(half, 3, 4, 2, 1),
        )

    def forward(self, x):
        z = self.down(x).float().permute(0, 2, 3, 1)
        quantized = self.codebook(z.flatten(0, 2)).view_as(z)
        commitment = F.mse_loss(z, quantized)
        # The decoder's gradient passes the choice unchanged.
        q = (z + (quantized - z).detach()).permute(0, 3, 1, 2)
        return F.mse_loss(self.up(q).float(), x) + 0.25 * commitment


def upsample(x):
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


class ModulatedConv(nn.Module):
    def __init__(self, inputs, outputs, kernel, style, demodulates):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, outputs, inputs, kernel, kernel) / (inputs * kernel**2) ** 0.5)
        self.style, self.demodulates = nn.Linear(style, inputs), demodulates

    def forward(self, x, style):
        batch, inputs, height, width = x.shape
        weight = self.weight * (self.style(style) + 1).view(batch, 1, inputs, 1, 1)
        if self.demodulates:
            weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = x.reshape(1, batch * inputs, height, width)
        y = F.conv2d(x, weight.flatten(0, 1), padding=weight.shape[-1] // 2, groups=batch)
        return y.view(batch, -1, height, width)


class StyledLayer(nn.Module):
    def __init__(self, inputs, outputs, style):
        super().__init__()
        self.conv = ModulatedConv(inputs, outputs, 3, style, True)
        self.noise, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(outputs, 1, 1))

    def forward(self, x, style):
        y = self.conv(x, style)
        noise = torch.randn(len(y), 1, *y.shape[2:], dtype=y.dtype, device=y.device)
        y = y + noise * self.noise.to(y.dtype) + self.bias.to(y.dtype)
        return F.leaky_relu(y, 0.2) * 2**0.5


class StyleLevel(nn.Module):
    def __init__(self, below, width, style, is_first):
        super().__init__()
        more = [] if is_first else [StyledLayer(width, width, style)]
        self.layers = nn.ModuleList([StyledLayer(below, width, style), *more])
        self.image, self.image_bias = ModulatedConv(width, 3, 1, style, False), nn.Parameter(torch.zeros(3, 1, 1))


class StyleGenerator(nn.Module):
    def __init__(self, widths, style):
        super().__init__()
        self.mapping = nn.ModuleList(nn.Linear(style, style) for _ in range(4))
        self.constant = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.levels = nn.ModuleList(
            StyleLevel(widths[max(k - 1, 0)], width, style, k == 0) for k, width in enumerate(widths)
        )

    def forward(self, z):
        style = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        for layer in self.mapping:
            style = F.leaky_relu(layer(style), 0.2)
        x, image = self.constant.to(style.dtype).expand(len(z), -1, -1, -1), None
        for k, level in enumerate(self.levels):
            x = upsample(x) if k > 0 else x
            for layer in level.layers:
                x = layer(x, style)
            more = level.image(x, style)
            more = more + level.image_bias.to(more.dtype)
            image = upsample(image) + more if k > 0 else more
        return image


class StyleDown(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, inputs, 3, 1, 1), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        y = F.leaky_relu(self.second(F.leaky_relu(self.first(x), 0.2)), 0.2)
        return (F.avg_pool2d(y, 2) + self.shortcut(F.avg_pool2d(x, 2))) * 0.5**0.5


class StyleDiscriminator(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[-1], 1)
        self.downs = nn.Sequential(*(StyleDown(a, b) for a, b in zip(widths[:0:-1], widths[-2::-1])))
        self.last = nn.Conv2d(widths[0] + 1, widths[0], 3, 1, 1)
        self.hidden, self.head = nn.Linear(16 * widths[0], widths[0]), nn.Linear(widths[0], 1)

    def forward(self, x):
        x = self.downs(F.leaky_relu(self.stem(x), 0.2))
        batch, channels, height, width = x.shape
        # Deviation of each feature within groups of four samples, as one more map.
        of_group = x.view(4, -1, channels, height, width).float()
        deviation = (of_group.var(0, correction=0) + 1e-8).sqrt().mean((1, 2, 3)).to(x.dtype)
        deviation = deviation.view(1, -1, 1, 1, 1).expand(4, -1, 1, height, width).reshape(batch, 1, height, width)
        x = F.leaky_relu(self.last(torch.cat([x, deviation], 1)), 0.2)
        return self.head(F.leaky_relu(self.hidden(x.flatten(1)), 0.2)).float()


class StyleGan(nn.Module):
    def __init__(self, widths, style):
        super().__init__()
        self.generator, self.discriminator = StyleGenerator(widths, style), StyleDiscriminator(widths)


class Sage(nn.Module):
    def __init__(self, inputs, outputs, pools):
        super().__init__()
        self.pool = nn.Linear(inputs, inputs) if pools else None
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, sources, targets):
        h, reduce = (F.relu(self.pool(x)), "amax") if self.pool else (x, "mean")
        messages = h.index_select(0, sources)
        at = targets.unsqueeze(-1).expand_as(messages)
        gathered = torch.zeros_like(h).scatter_reduce(0, at, messages, reduce, include_self=False)
        return F.normalize(self.own(x) + self.neighbours(gathered), dim=-1)


class GraphSage(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.layers = nn.ModuleList(Sage(width, classes if k == 3 else width, k % 2 == 0) for k in range(4))

    def forward(self, x, sources, targets):
        for k, layer in enumerate(self.layers):
            x = layer(x, sources, targets)
            x = F.relu(x) if k < 3 else x
        return x


class WindowAttention(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        window = self.window
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        around = lambda t: F.pad(t, (0, 0, window, window)).unfold(2, 3 * window, window)
        scores = q.unflatten(2, (-1, window)) @ around(k) * q.shape[-1] ** -0.5
        y = scores.masked_fill(mask, -math.inf).softmax(-1) @ around(v).transpose(-2, -1)
        return self.out(y.flatten(2, 3).transpose(1, 2).flatten(2))


class LongformerBlock(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), WindowAttention(width, heads, window)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Longformer(nn.Module):
    def __init__(self, length, vocabulary, width, heads, window, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(LongformerBlock(width, heads, window) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        keys = torch.arange(3 * window) - window
        at = torch.arange(length // window)[:, None, None] * window + keys
        far = (keys - torch.arange(window)[:, None]).abs() > window
        self.register_buffer("mask", far | (at < 0) | (at >= length))

    def forward(self, text):
        x = self.tokens(text) + self.positions.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def squash(x):
    square = x.square().sum(-1, keepdim=True)
    return x * (square / ((square + 1) * (square + 1e-8).sqrt()))


class CapsNet(nn.Module):
    def __init__(self, side, channels, maps, classes, outputs, inputs=8):
        super().__init__()
        self.stem, self.primary = nn.Conv2d(1, channels, 9), nn.Conv2d(channels, inputs * maps, 9, 2)
        self.inputs, self.count = inputs, maps * ((side - 17) // 2 + 1) ** 2
        self.weight = nn.Parameter(0.01 * torch.randn(classes, self.count, outputs, inputs))
        widths = [classes * outputs, 512, 1024, side * side]
        self.decoder = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x, rounds=3):
        y = self.primary(F.relu(self.stem(x)))
        y = squash(y.view(len(x), self.inputs, self.count).transpose(1, 2))
        votes = torch.einsum("jnoi,bni->bjno", self.weight, y)
        fixed = votes.detach()
        logits = torch.zeros(len(x), len(self.weight), self.count, device=x.device)
        for _ in range(1, rounds):
            v = squash((logits.softmax(1).unsqueeze(-1) * fixed).sum(2))
            logits = logits + (fixed * v.unsqueeze(2)).sum(-1)
        return squash((logits.softmax(1).unsqueeze(-1) * votes).sum(2))


class PointFeatures(nn.Module):
    def __init__(self, width, features):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, features)
        )

    def forward(self, x):
        return F.normalize(self.layers(x).float(), dim=-1)


class Agent(nn.Module):
    def __init__(self, observed, hidden, actions):
        super().__init__()
        mlp = lambda outputs: nn.Sequential(
            nn.Linear(observed, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
        )
        self.policy, self.value = mlp(actions), mlp(1)

    def forward(self, x):
        return self.policy(x).float(), self.value(x).float()


class Segmenter(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        widths, layers = [3, width, width, 2 * width, 2 * width, 4 * width], []
        for k, (a, b) in enumerate(zip(widths, widths[1:])):
            layers += [nn.Conv2d(a, b, 3, 2 if k % 2 == 0 else 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(4 * width, classes, 1))

    def forward(self, x):
        return F.interpolate(self.layers(x), size=x.shape[2:], mode="bilinear")


def lovasz_softmax(probabilities, truth):
    errors, order = (truth - probabilities).abs().sort(1, descending=True)
    truth = truth.gather(1, order)
    total = truth.sum(1, keepdim=True)
    jaccard = 1 - (total - truth.cumsum(1)) / (total + (1 - truth).cumsum(1))
    weights = torch.cat([jaccard[:, :1], jaccard.diff()], 1)
    return (errors * weights).sum(1).mean()


def gmlp(tiny, dev):
    batch, side, patch, width, hidden, layers = (2, 16, 4, 8, 16, 2) if tiny else (64, 224, 16, 256, 1536, 12)
    x, y = torch.randn(batch, 3, side, side, device=dev), torch.randint(0, 1000, (batch,), device=dev)
    net = Gmlp(side, patch, width, hidden, layers)
    return f"{batch}x3x{side}x{side}", net, lambda net: F.cross_entropy(net(x), y)


def conformer(tiny, dev):
    batch, frames, bands, width, heads, kernel, layers, labels, classes = (
        (2, 64, 8, 16, 2, 5, 2, 3, 10) if tiny else (16, 1024, 80, 256, 4, 31, 8, 60, 256)
    )
    x = torch.randn(batch, 1, frames, bands, device=dev)
    text = torch.randint(1, classes, (batch, labels), device=dev)
    counts = lambda n: torch.full((batch,), n, device=dev)
    steps, labels = counts(frames // 4), counts(labels)
    net = Conformer(frames // 4, bands, width, heads, kernel, layers, classes)
    return f"{batch}x{frames}x{bands}", net, lambda net: F.ctc_loss(net(x), text, steps, labels)


def mae(tiny, dev):
    batch, side, patch, wide, narrow, counts = (
        (2, 16, 4, (16, 2), (8, 2), (2, 1)) if tiny else (64, 224, 16, (768, 12), (512, 16), (12, 4))
    )
    x = torch.randn(batch, 3, side, side, device=dev)
    return f"{batch}x3x{side}x{side}", Mae(side, patch, wide, narrow, counts), lambda net: net(x)


def vqvae(tiny, dev):
    batch, side, width, features, codes = (2, 16, 8, 4, 10) if tiny else (128, 64, 128, 64, 1024)
    x = torch.rand(batch, 3, side, side, device=dev)
    return f"{batch}x3x{side}x{side}", VqVae(width, features, codes), lambda net: net(x)


def stylegan(tiny, dev):
    batch, style, widths = (4, 8, [8, 4]) if tiny else (32, 512, [512, 512, 256, 128, 64])
    side = 4 << (len(widths) - 1)
    x = 2 * torch.rand(batch, 3, side, side, device=dev) - 1

    def make_step(net, new_optimizer, wrap):
        generator, discriminator = wrap(net.generator), wrap(net.discriminator)
        train_d, train_g = new_optimizer(net.discriminator), new_optimizer(net.generator)

        def step():
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                generated = generator(torch.randn(batch, style, device=dev))
                loss_d = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(generated.detach())).mean()
            loss_d.backward()
            train_d.step()
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                loss_g = F.softplus(-discriminator(generated)).mean()
            loss_g.backward()
            train_g.step()
            train_g.zero_grad(set_to_none=True)
            # The generator's loss left gradients in the discriminator too.
            train_d.zero_grad(set_to_none=True)
            return loss_d.detach() + loss_g.detach()

        return step

    return f"{batch}x3x{side}x{side}", StyleGan(widths, style), make_step


stylegan.has_own_step = True


def sage(tiny, dev):
    nodes, edges, width, classes = (50, 200, 8, 5) if tiny else (50_000, 500_000, 128, 40)
    x, y = torch.randn(nodes, width, device=dev), torch.randint(0, classes, (nodes,), device=dev)
    sources, targets = (torch.randint(0, nodes, (edges,), device=dev) for _ in range(2))
    loss = lambda net: F.cross_entropy(net(x, sources, targets), y)
    return f"{nodes}x{edges}x{width}", GraphSage(width, classes), loss


def longformer(tiny, dev):
    batch, length = (2, 16) if tiny else (2, 4096)
    vocabulary, width, heads, window, layers = (50, 16, 2, 4, 2) if tiny else (8192, 512, 8, 256, 6)
    text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(2))
    net = Longformer(length, vocabulary, width, heads, window, layers)
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text).flatten(0, 1), target.flatten())


def capsules(tiny, dev):
    batch, side, channels, maps, classes, outputs = (2, 20, 8, 4, 3, 4) if tiny else (128, 28, 256, 32, 10, 16)
    x, label = torch.rand(batch, 1, side, side, device=dev), torch.randint(0, classes, (batch,), device=dev)

    def loss_of(net):
        v = net(x)
        truth = F.one_hot(label, classes).float()
        lengths = (v.square().sum(-1) + 1e-8).sqrt()
        absent = 0.5 * F.relu(lengths - 0.1).square() * (1 - truth)
        margin = (F.relu(0.9 - lengths).square() * truth + absent).sum(1).mean()
        y = (v * truth.unsqueeze(-1)).flatten(1)
        for layer in net.decoder[:-1]:
            y = F.relu(layer(y))
        y = net.decoder[-1](y).float().sigmoid()
        return margin + 0.0005 * (y - x.flatten(1)).square().sum(1).mean()

    return f"{batch}x1x{side}x{side}", CapsNet(side, channels, maps, classes, outputs), loss_of


def sinkhorn(tiny, dev, blur=0.05):
    batch, points, width, features, iterations = (2, 8, 8, 4, 2) if tiny else (32, 512, 256, 64, 20)
    first, second = (torch.randn(batch, points, 3, device=dev) for _ in range(2))
    # All points have the same mass.
    mass = -math.log(points)

    def loss_of(net):
        cost = torch.cdist(net(first), net(second))
        scaled = cost / -blur
        u = v = torch.zeros(batch, points, device=dev)
        for _ in range(iterations):
            u = mass - (scaled + v.unsqueeze(1)).logsumexp(2)
            v = mass - (scaled + u.unsqueeze(2)).logsumexp(1)
        plan = (scaled + u.unsqueeze(2) + v.unsqueeze(1)).exp()
        return (plan * cost).sum((1, 2)).mean()

    return f"{batch}x{points}", PointFeatures(width, features), loss_of


def advantages_of(rewards, values, goes_on, discount=0.99, smoothing=0.95):
    last, found = torch.zeros_like(rewards[0]), []
    for t in reversed(range(len(rewards))):
        error = rewards[t] + values[t + 1] * goes_on[t] * discount - values[t]
        last = error + last * goes_on[t] * (discount * smoothing)
        found.append(last)
    advantages = torch.stack(found[::-1])
    return advantages, advantages + values[:-1]


def ppo(tiny, dev, clip=0.2):
    steps, environments, observed, hidden, actions, minibatches = (
        (4, 4, 3, 8, 2, 2) if tiny else (128, 64, 24, 64, 6, 4)
    )
    rows = steps * environments
    observations = torch.randn(rows + environments, observed, device=dev)
    taken, rewards = torch.randint(0, actions, (rows,), device=dev), torch.randn(steps, environments, device=dev)
    goes_on = (torch.rand(steps, environments, device=dev) < 0.99).float()

    def make_step(net, new_optimizer, wrap):
        run, opt = wrap(net), new_optimizer(net)

        def step():
            # What the networks say before the updates.
            with torch.no_grad(), torch.autocast(dev.type, dtype=torch.bfloat16):
                logits, values = run(observations)
                before = logits[:rows].log_softmax(-1).gather(1, taken.unsqueeze(1)).squeeze(1)
                values = values.view(steps + 1, environments)
                advantages, returns = (t.flatten() for t in advantages_of(rewards, values, goes_on))
                old_values = values[:-1].flatten()
            total = 0
            for at in torch.randperm(rows, device=dev).chunk(minibatches):
                with torch.autocast(dev.type, dtype=torch.bfloat16):
                    logits, values = run(observations[at])
                    log_probs, values = logits.log_softmax(-1), values.squeeze(1)
                    now = log_probs.gather(1, taken[at].unsqueeze(1)).squeeze(1)
                    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                    gain = advantages[at]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    ratio = (now - before[at]).exp()
                    policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
                    old, goal = old_values[at], returns[at]
                    moved = (values - old).clamp(-clip, clip) + old
                    value_loss = 0.5 * torch.max((values - goal).square(), (moved - goal).square()).mean()
                    loss = policy_loss - 0.01 * entropy + 0.5 * value_loss
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
                opt.zero_grad(set_to_none=True)
                total = total + loss.detach()
            return total / minibatches

        return step

    return f"{steps}x{environments}x{observed}", Agent(observed, hidden, actions), make_step


ppo.has_own_step = True


def lovasz(tiny, dev):
    batch, side, width, classes = (2, 16, 4, 3) if tiny else (8, 256, 64, 16)
    x = torch.randn(batch, 3, side, side, device=dev)
    labels = torch.randint(0, classes, (batch, side, side), device=dev)
    truth = F.one_hot(labels.flatten(), classes).t().float().contiguous()

    def loss_of(net):
        probabilities = net(x).float().softmax(1)
        return lovasz_softmax(probabilities.transpose(0, 1).flatten(1), truth)

    return f"{batch}x3x{side}x{side}", Segmenter(width, classes), loss_of


MORE_MODELS = [
    gmlp, conformer, mae, vqvae, stylegan, sage, longformer, capsules, sinkhorn, ppo, lovasz,
]
