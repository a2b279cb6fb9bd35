"""More models of `models.py`, for other parts of the library: maps, likelihoods, recurrent loops and adapters."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features):
        y = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(y)))


class DenseNet(nn.Module):
    def __init__(self, first, growth, counts):
        super().__init__()
        self.stem = nn.Conv2d(3, first, 7, 2, 3, bias=False)
        self.stem_norm, width = nn.BatchNorm2d(first), first
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for k, count in enumerate(counts):
            self.blocks.append(nn.ModuleList(DenseLayer(width + j * growth, growth) for j in range(count)))
            width += count * growth
            if k + 1 < len(counts):
                conv = nn.Conv2d(width, width // 2, 1, bias=False)
                self.transitions.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), conv, nn.AvgPool2d(2)))
                width //= 2
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        for k, block in enumerate(self.blocks):
            features = [x]
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, 1)
            x = self.transitions[k](x) if k < len(self.transitions) else x
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def conv_bn(inputs, outputs, kernel, stride=1, dilation=1):
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, dilation):
        super().__init__()
        self.first, self.second = conv_bn(inputs, outputs, 3, stride, dilation), conv_bn(outputs, outputs, 3, 1, dilation)
        self.shortcut = conv_bn(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A stage has two blocks: channels, stride and dilation."""
    def __init__(self, first, stages):
        super().__init__()
        self.stem, self.stages, inputs = conv_bn(3, first, 7, 2), nn.ModuleList(), first
        for outputs, stride, dilation in stages:
            blocks = BasicBlock(inputs, outputs, stride, dilation), BasicBlock(outputs, outputs, 1, dilation)
            self.stages.append(nn.Sequential(*blocks))
            inputs = outputs

    def forward(self, x):
        x, maps = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class Pyramid(nn.Module):
    def __init__(self, inputs, outputs, rates):
        super().__init__()
        branches = [conv_bn(inputs, outputs, 1)] + [conv_bn(inputs, outputs, 3, 1, rate) for rate in rates]
        self.branches, self.pooled = nn.ModuleList(branches), conv_bn(inputs, outputs, 1)
        self.project, self.dropout = conv_bn((len(branches) + 1) * outputs, outputs, 1), nn.Dropout(0.5)

    def forward(self, x):
        maps = [F.relu(branch(x)) for branch in self.branches]
        pooled = F.relu(self.pooled(F.adaptive_avg_pool2d(x, 1)))
        maps.append(F.interpolate(pooled, size=x.shape[2:], mode="bilinear"))
        return self.dropout(F.relu(self.project(torch.cat(maps, 1))))


class Segmentation(nn.Module):
    def __init__(self, width, classes, rates):
        super().__init__()
        stages = [(width, 1, 1), (2 * width, 2, 1), (4 * width, 1, 2), (8 * width, 1, 4)]
        self.backbone, self.pyramid = ResNet(width, stages), Pyramid(8 * width, 4 * width, rates)
        self.smooth, self.head = conv_bn(4 * width, 4 * width, 3), nn.Conv2d(4 * width, classes, 1)

    def forward(self, x):
        y = F.relu(self.smooth(self.pyramid(self.backbone(x)[-1])))
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear")


class FeaturePyramid(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(n, width, 1) for n in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in inputs)
        self.coarser = nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for _ in range(2))

    def forward(self, maps):
        sums = []
        for x, lateral in zip(maps[::-1], self.lateral[::-1]):
            y = lateral(x)
            sums.append(y + F.interpolate(sums[-1], size=y.shape[2:], mode="nearest") if sums else y)
        levels = [smooth(x) for x, smooth in zip(sums[::-1], self.smooth)]
        for coarser in self.coarser:
            levels.append(coarser(F.relu(levels[-1])))
        return levels


def tower(width, groups, count):
    layer = lambda: [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(groups, width), nn.ReLU()]
    return nn.Sequential(*(module for _ in range(count) for module in layer()))


class Detector(nn.Module):
    def __init__(self, first, width, groups, count, classes):
        super().__init__()
        stages = [(first, 1, 1), (2 * first, 2, 1), (4 * first, 2, 1), (8 * first, 2, 1)]
        self.backbone = ResNet(first, stages)
        self.pyramid = FeaturePyramid([2 * first, 4 * first, 8 * first], width)
        self.class_tower, self.box_tower = tower(width, groups, count), tower(width, groups, count)
        self.classes = nn.Conv2d(width, classes, 3, padding=1)
        self.boxes = nn.Conv2d(width, 4, 3, padding=1)
        # Most cells have no object, so their probability starts at 0.01.
        nn.init.constant_(self.classes.bias, -math.log(0.99 / 0.01))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(5))

    def forward(self, x):
        cells = lambda x: x.permute(0, 2, 3, 1).flatten(1, 2)
        classes, boxes = [], []
        for level, scale in zip(self.pyramid(self.backbone(x)[1:]), self.scales):
            classes.append(cells(self.classes(self.class_tower(level))))
            boxes.append(cells((self.boxes(self.box_tower(level)) * scale).exp()))
        return torch.cat(classes, 1), torch.cat(boxes, 1)


def focal_loss(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    absent = 1 - target
    hit = p * target + (1 - p) * absent
    weight = alpha * target + (1 - alpha) * absent
    return (weight * (1 - hit) ** gamma * entropy).sum()


class ClipBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, is_causal):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.up(self.norm2(x))
        # The fast approximation of GELU.
        return x + self.down(y * torch.sigmoid(1.702 * y))


class ImageTower(nn.Module):
    def __init__(self, side, patch, width, heads, layers, joint):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2 + 1, width))
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(ClipBlock(width, heads) for _ in range(layers))
        self.proj = nn.Linear(width, joint, bias=False)

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        token = self.token.to(y.dtype).expand(len(y), -1, -1)
        y = self.norm(torch.cat([token, y], 1) + self.positions)
        for block in self.blocks:
            y = block(y, False)
        return self.proj(self.last_norm(y[:, 0]))


class TextTower(nn.Module):
    def __init__(self, vocabulary, length, width, heads, layers, joint):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.tokens.weight.data.mul_(0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(ClipBlock(width, heads) for _ in range(layers))
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, joint, bias=False)

    def forward(self, text):
        y = self.tokens(text) + self.positions
        for block in self.blocks:
            y = block(y, True)
        # The end has the highest index of all tokens.
        return self.proj(self.norm(y)[torch.arange(len(y), device=y.device), text.argmax(-1)])


class Clip(nn.Module):
    def __init__(self, side, patch, image, vocabulary, length, text, joint):
        super().__init__()
        self.images = ImageTower(side, patch, *image, joint)
        self.texts = TextTower(vocabulary, length, *text, joint)
        self.log_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))

    def forward(self, x, text):
        images, texts = F.normalize(self.images(x), dim=-1), F.normalize(self.texts(text), dim=-1)
        return images @ texts.t() * self.log_scale.exp()


class FlowStep(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.first, self.middle = nn.Conv2d(channels // 2, hidden, 3, padding=1), nn.Conv2d(hidden, hidden, 1)
        self.last = nn.Conv2d(hidden, channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x):
        pixels = x.shape[2] * x.shape[3]
        x = (x + self.shift) * self.log_scale.exp()
        x = F.conv2d(x, self.mix[:, :, None, None])
        constant = (self.log_scale.sum() + torch.linalg.slogdet(self.mix)[1]) * pixels
        a, b = x.chunk(2, 1)
        log_scale, shift = self.last(F.relu(self.middle(F.relu(self.first(a))))).chunk(2, 1)
        log_scale = log_scale.tanh()
        b = b * log_scale.exp() + shift
        return torch.cat([a.to(b.dtype), b], 1), log_scale.sum((1, 2, 3)) + constant


class Flow(nn.Module):
    def __init__(self, levels, steps, hidden):
        super().__init__()
        level = lambda k: nn.ModuleList(FlowStep(12 << k, hidden) for _ in range(steps))
        self.levels = nn.ModuleList(level(k) for k in range(levels))

    def squeeze(self, x):
        x = x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
        return x.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)

    def log_normal(self, z):
        return -0.5 * (z.square() + math.log(2 * math.pi)).sum((1, 2, 3))

    def forward(self, x):
        # Images have 256 levels; noise makes them continuous.
        elements, x = x[0].numel(), x + torch.rand_like(x) / 256 - 0.5
        total = torch.zeros(len(x), device=x.device)
        for k, level in enumerate(self.levels):
            x = self.squeeze(x)
            for step in level:
                x, determinant = step(x)
                total = total + determinant
            # Half of the channels is done after each level.
            if k + 1 < len(self.levels):
                x, z = x.chunk(2, 1)
                total = total + self.log_normal(z)
        return -(total + self.log_normal(x)).mean() / (math.log(2) * elements) + 8


class GatedAttention(nn.Module):
    def __init__(self, width, heads, chunk, temperature=16.0):
        super().__init__()
        self.heads, self.chunk, self.temperature = heads, chunk, temperature
        linear = lambda outputs: nn.Linear(width, outputs, bias=False)
        self.query, self.key, self.value = linear(width // 2), linear(width // 2), linear(width)
        self.decay = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, width // 2))
        self.gate, self.norm, self.out = linear(width), nn.RMSNorm(width // heads), linear(width)

    def forward(self, x):
        batch, length = x.shape[:2]
        heads, chunk, chunks = self.heads, self.chunk, length // self.chunk
        split = lambda t: t.reshape(batch, chunks, chunk, heads, -1).permute(0, 3, 1, 2, 4)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        sums = split(F.logsigmoid(self.decay(x).float()) / self.temperature).cumsum(-2)
        total = sums[..., -1:, :]
        reads = q * sums.exp() * q.shape[-1] ** -0.5
        # Within chunks.
        scores = torch.einsum("bhnid,bhnjd->bhnij", reads, k * (-sums).exp())
        inside = torch.einsum("bhnij,bhnjd->bhnid", scores.tril(), v)
        # What each chunk adds to the state, and the state before each chunk.
        added = torch.einsum("bhnid,bhnie->bhnde", k * (total - sums).exp(), v)
        kept = total.exp().transpose(-2, -1)
        state = torch.zeros(batch, heads, *added.shape[3:], device=x.device)
        states = []
        for n in range(chunks):
            states.append(state)
            state = state * kept[:, :, n] + added[:, :, n]
        before = torch.einsum("bhnid,bhnde->bhnie", reads, torch.stack(states, 2))
        y = (inside + before).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, -1)
        return self.out(self.norm(y).flatten(2) * F.silu(self.gate(x)))


class ChannelMix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.ParameterList(nn.Parameter(torch.full((width,), 0.5)) for _ in range(2))
        self.key, self.value = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x):
        change = F.pad(x, (0, 0, 1, -1)) - x
        k = F.relu(self.key(x + change * self.mix[0])).square()
        return torch.sigmoid(self.gate(x + change * self.mix[1])) * self.value(k)


class Gla(nn.Module):
    def __init__(self, vocabulary, width, heads, chunk, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        norms = lambda: nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.norms1, self.norms2 = norms(), norms()
        self.attentions = nn.ModuleList(GatedAttention(width, heads, chunk) for _ in range(layers))
        self.networks = nn.ModuleList(ChannelMix(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text):
        x = self.tokens(text)
        for norm1, attention, norm2, network in zip(self.norms1, self.attentions, self.norms2, self.networks):
            x = x + attention(norm1(x))
            x = x + network(norm2(x))
        return self.head(self.norm(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocabulary, embedded, hidden):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, embedded), nn.Embedding(vocabulary, embedded)
        self.encoder, self.start = nn.GRU(embedded, hidden, bidirectional=True), nn.Linear(2 * hidden, hidden)
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(2 * hidden, hidden, bias=False)
        self.scorer = nn.Linear(hidden, 1, bias=False)
        self.decoder, self.head = nn.GRUCell(embedded + 2 * hidden, hidden), nn.Linear(3 * hidden, vocabulary)

    def forward(self, source, text):
        memory, last = self.encoder(self.source(source))
        state = self.start(torch.cat([last[0], last[1]], -1)).tanh()
        keys, states = self.key(memory), []
        for word in self.target(text).unbind(0):
            scores = self.scorer((keys + self.query(state)).tanh())
            context = (scores.softmax(0) * memory).sum(0)
            state = self.decoder(torch.cat([word.to(context.dtype), context], -1), state)
            states.append(torch.cat([state, context.to(state.dtype)], -1))
        return self.head(torch.stack(states, 0))


class LoraLinear(nn.Module):
    """Frozen layer, with an adapter of two thin layers."""
    def __init__(self, inputs, outputs, rank=16, scale=2.0):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).to(torch.bfloat16).requires_grad_(False)
        self.dropout, self.scale = nn.Dropout(0.05), scale
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * self.scale


def frozen(module):
    return module.to(torch.bfloat16).requires_grad_(False)


class LoraBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = frozen(nn.LayerNorm(width)), frozen(nn.LayerNorm(width))
        self.qkv, self.proj = LoraLinear(width, 3 * width), LoraLinear(width, width)
        self.up, self.down = LoraLinear(width, 4 * width), LoraLinear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Lora(nn.Module):
    def __init__(self, vocabulary, length, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            table.weight.data.mul_(0.02)
            frozen(table)
        self.blocks = nn.ModuleList(LoraBlock(width, heads) for _ in range(layers))
        self.norm = frozen(nn.LayerNorm(width))

    def forward(self, text):
        x = self.tokens(text) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Solution(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        widths = [2] + [width] * layers
        layer = lambda a, b: [nn.Linear(a, b), nn.Tanh()]
        hidden = [module for a, b in zip(widths, widths[1:]) for module in layer(a, b)]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], 1)).float()


class Values(nn.Module):
    def __init__(self, side, frames, actions, hidden):
        super().__init__()
        last = ((side - 8) // 4 - 3) // 2 - 1
        self.layers = nn.Sequential(
            nn.Conv2d(frames, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * last * last, hidden), nn.ReLU(), nn.Linear(hidden, actions),
        )

    def forward(self, x):
        return self.layers(x.float() / 255).float()


def densenet(tiny, dev):
    batch, side = (2, 32) if tiny else (64, 224)
    x, y = torch.randn(batch, 3, side, side, device=dev), torch.randint(0, 1000, (batch,), device=dev)
    net = DenseNet(8, 4, [2, 2]) if tiny else DenseNet(64, 32, [6, 12, 24, 16])
    return f"{batch}x3x{side}x{side}", net, lambda net: F.cross_entropy(net(x), y)


def segmentation(tiny, dev):
    batch, side, width, classes, rates = (2, 32, 4, 5, (1, 2)) if tiny else (8, 512, 64, 21, (12, 24))
    x = torch.randn(batch, 3, side, side, device=dev)
    y = torch.randint(0, classes, (batch, side, side), device=dev)
    # About a tenth of the pixels is not labelled.
    y = y.masked_fill(torch.rand(batch, side, side, device=dev) < 0.1, 255)
    net = Segmentation(width, classes, rates)
    return f"{batch}x3x{side}x{side}", net, lambda net: F.cross_entropy(net(x), y, ignore_index=255)


def detector(tiny, dev):
    batch, side, first, width, groups, count, classes, per_image = (
        (2, 64, 4, 8, 2, 2, 5, 3) if tiny else (8, 512, 64, 256, 32, 4, 80, 100)
    )
    x = torch.randn(batch, 3, side, side, device=dev)
    cells = sum((-(-side // (1 << k))) ** 2 for k in range(3, 8))
    objects = batch * per_image
    # Cells with an object, their classes, and the distances to the sides of their boxes.
    at = torch.arange(objects, device=dev)
    positives = at // per_image * cells + at % per_image * 37 % cells
    found = torch.randint(0, classes, (objects,), device=dev)
    labels = torch.full((batch * cells,), -1, device=dev).index_copy(0, positives, found).view(batch, cells)
    sides, names = 4 * torch.rand(objects, 4, device=dev), torch.arange(classes, device=dev)

    def loss_of(net):
        logits, boxes = net(x)
        target = (labels.unsqueeze(-1) == names).float()
        loss = F.smooth_l1_loss(boxes.flatten(0, 1).index_select(0, positives), sides, reduction="sum")
        return (focal_loss(logits.float(), target) + loss) / objects

    return f"{batch}x3x{side}x{side}", Detector(first, width, groups, count, classes), loss_of


def clip(tiny, dev):
    batch, side, patch, vocabulary, length, joint = (4, 16, 8, 50, 8, 8) if tiny else (128, 224, 16, 49_408, 77, 512)
    image, text = ((16, 2, 2), (16, 2, 1)) if tiny else ((384, 6, 12), (512, 8, 6))
    x = torch.randn(batch, 3, side, side, device=dev)
    words = torch.randint(0, vocabulary, (batch, length), device=dev)
    labels = torch.arange(batch, device=dev)

    def loss_of(net):
        logits = net(x, words)
        return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))

    return f"{batch}x3x{side}x{side}", Clip(side, patch, image, vocabulary, length, text, joint), loss_of


def flow(tiny, dev):
    batch, side, levels, steps, hidden = (2, 8, 2, 2, 8) if tiny else (64, 32, 3, 8, 512)
    x = torch.rand(batch, 3, side, side, device=dev)
    return f"{batch}x3x{side}x{side}", Flow(levels, steps, hidden), lambda net: net(x)


def gla(tiny, dev):
    batch, length = (2, 16) if tiny else (8, 1024)
    vocabulary, width, heads, chunk, layers = (50, 16, 2, 4, 2) if tiny else (8192, 512, 4, 64, 6)
    text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(2))
    net = Gla(vocabulary, width, heads, chunk, layers)
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text).flatten(0, 1), target.flatten())


def seq2seq(tiny, dev):
    batch, length, vocabulary, embedded, hidden = (2, 5, 30, 8, 8) if tiny else (64, 50, 10_000, 256, 512)
    source, text, target = (torch.randint(0, vocabulary, (length, batch), device=dev) for _ in range(3))
    loss = lambda net: F.cross_entropy(net(source, text).flatten(0, 1), target.flatten())
    return f"{batch}x{length}", Seq2Seq(vocabulary, embedded, hidden), loss


def lora(tiny, dev):
    batch, length = (2, 8) if tiny else (8, 512)
    vocabulary, width, heads, layers = (50, 32, 2, 2) if tiny else (50_257, 768, 12, 12)
    text, target = (torch.randint(0, vocabulary, (batch, length), device=dev) for _ in range(2))
    net = Lora(vocabulary, length, width, heads, layers)
    return f"{batch}x{length}", net, lambda net: F.cross_entropy(net(text).flatten(0, 1), target.flatten())


def physics(tiny, dev, viscosity=0.01 / math.pi):
    points, border, width, layers = (16, 8, 8, 2) if tiny else (65_536, 4096, 256, 6)
    uniform = lambda count: torch.rand(count, 1, device=dev)
    inside_x, inside_t = 2 * uniform(points) - 1, uniform(points)
    x0 = 2 * uniform(border) - 1
    t0, y0 = torch.zeros_like(x0), -(math.pi * x0).sin()
    derivative = lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def loss_of(net):
        x, t = inside_x.detach().requires_grad_(), inside_t.detach().requires_grad_()
        y = net(x, t)
        by_x, by_t = derivative(y, x), derivative(y, t)
        residual = by_t + y * by_x - viscosity * derivative(by_x, x)
        return residual.square().mean() + F.mse_loss(net(x0, t0), y0)

    return f"{points}x{width}", Solution(width, layers), loss_of


def dqn(tiny, dev, discount=0.99, rate=0.005):
    batch, side, stored, frames, actions, hidden = (4, 36, 20, 2, 3, 16) if tiny else (512, 84, 20_000, 4, 18, 512)
    images = torch.randint(0, 256, (stored, frames, side, side), dtype=torch.uint8, device=dev)
    done = torch.randint(0, 2, (stored,), device=dev).float()
    taken, rewards = torch.randint(0, actions, (stored,), device=dev), torch.randn(stored, device=dev)
    new_net = lambda: Values(side, frames, actions, hidden).to(dev)

    def make_step(net, new_optimizer, wrap):
        follower = new_net().requires_grad_(False)
        run, run_follower, opt = wrap(net), wrap(follower), new_optimizer(net)

        def step():
            at = torch.randint(0, stored - 1, (batch,), device=dev)
            now, then = images.index_select(0, at), images.index_select(0, at + 1)
            with torch.no_grad(), torch.autocast(dev.type, dtype=torch.bfloat16):
                best = run(then).argmax(1, keepdim=True)
                value = run_follower(then).gather(1, best).squeeze(1)
            goal = rewards.index_select(0, at) + value * (1 - done.index_select(0, at)) * discount
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                values = run(now).gather(1, taken.index_select(0, at).unsqueeze(1)).squeeze(1)
                loss = F.smooth_l1_loss(values, goal)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            with torch.no_grad():
                for old, new in zip(follower.parameters(), net.parameters()):
                    old.lerp_(new, rate)
            return loss.detach()

        return step

    return f"{batch}x{frames}x{side}x{side}", new_net(), make_step


dqn.has_own_step = True

NEWER_MODELS = [densenet, segmentation, detector, clip, flow, gla, seq2seq, lora, physics, dqn]
