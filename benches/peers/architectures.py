"""Creates tests/modules/architectures.safetensors: small models of well-known architectures in PyTorch.

The models have random weights with the names of published files; results and the gradients of all parameters are recorded.

    python benches/peers/architectures.py [tests/modules/architectures.safetensors]

Needs torch, torchvision and safetensors; runs on the CPU. cases.py documents the names of the tensors.
"""
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.densenet import DenseNet
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import BasicBlock, Bottleneck, conv1x1
from torchvision.models.vision_transformer import VisionTransformer

from cases import case, data, save

R = torch.randn
BOTH = ("train", "eval")


# torchvision's ResNet and VGG have fixed widths, so these are narrower copies with equal names.
class ResNet(nn.Module):
    def __init__(self, block, planes):
        super().__init__()
        self.inplanes = 4
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(block, planes[0], 2, 1)
        self.layer2 = self._layer(block, planes[1], 1, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(planes[1] * block.expansion, 5)

    def _layer(self, block, planes, n, stride):
        down = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            down = nn.Sequential(conv1x1(self.inplanes, planes * block.expansion, stride), nn.BatchNorm2d(planes * block.expansion))
        layers = [block(self.inplanes, planes, stride, down)]
        self.inplanes = planes * block.expansion
        layers += [block(self.inplanes, planes) for _ in range(1, n)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


case("resnet_basic", lambda: ResNet(BasicBlock, (4, 6)), lambda: [R(3, 3, 32, 32)], modes=BOTH)
case("resnet_bottleneck", lambda: ResNet(Bottleneck, (2, 3)), lambda: [R(3, 3, 32, 32)])


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2, 2),
            nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(24, 10), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(10, 10), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(10, 5))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


case("vgg", Vgg, lambda: [R(2, 3, 12, 12)])

# Depthwise convolutions, squeeze-and-excitation, hardswish.
conf = partial(InvertedResidualConfig, width_mult=1.0)
case("mobilenet_v3", lambda: MobileNetV3([conf(8, 3, 8, 8, True, "RE", 2, 1), conf(8, 5, 16, 8, True, "HS", 1, 1), conf(8, 3, 16, 8, False, "HS", 2, 1)], 10, num_classes=4, dropout=0.0),
     lambda: [R(3, 3, 24, 24)], modes=BOTH)
case("densenet", lambda: DenseNet(growth_rate=3, block_config=(2, 2), num_init_features=4, bn_size=2, num_classes=5), lambda: [R(2, 3, 32, 32)])
mb = partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
case("efficientnet", lambda: EfficientNet([mb(1, 3, 1, 8, 8, 1), mb(2, 5, 2, 8, 8, 2)], dropout=0.0, stochastic_depth_prob=0.0, num_classes=4, last_channel=12),
     lambda: [R(2, 3, 16, 16)])
# Layer norm over channels, depthwise convolutions, a scale for each layer.
case("convnext", lambda: ConvNeXt([CNBlockConfig(4, 6, 1), CNBlockConfig(6, None, 2)], 0.0, layer_scale=0.5, num_classes=3), lambda: [R(2, 3, 28, 28)])
case("vit", lambda: VisionTransformer(8, 4, 2, 2, 8, 12, num_classes=3), lambda: [R(2, 3, 8, 8)])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        def double(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())
        self.downs = nn.ModuleList([double(2, 4), double(4, 6)])
        self.middle = double(6, 8)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 2, 2)])
        self.joins = nn.ModuleList([double(12, 6), double(8, 4)])
        self.heads = nn.ModuleDict({"mask": nn.Conv2d(4, 1, 1), "edges": nn.Conv2d(4, 2, 1)})

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(skips)):
            x = join(torch.cat([skip, up(x)], 1))
        return self.heads["mask"](x), self.heads["edges"](x)


case("unet", UNet, lambda: [R(1, 2, 8, 12)])


# Llama, with the names of its published files: grouped-query attention, rotary embeddings, RMS norms, gated MLPs.
class Rms(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, base=10000.0):
    n, d = x.shape[-2:]
    angle = torch.arange(n, dtype=torch.float64)[:, None] * base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    c, s = angle.cos().float(), angle.sin().float()
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class LlamaLayer(nn.Module):
    def __init__(self, d, heads, kv, ff):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, d // heads
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(d, (heads if n == "q" else kv) * self.size, bias=False) for n in "qkv"})
        self.self_attn["o_proj"] = nn.Linear(d, d, bias=False)
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(d, ff, bias=False), "up_proj": nn.Linear(d, ff, bias=False), "down_proj": nn.Linear(ff, d, bias=False)})
        self.input_layernorm, self.post_attention_layernorm = Rms(d), Rms(d)

    def forward(self, x):
        y, a = self.input_layernorm(x), self.self_attn
        split = lambda t, n: t.unflatten(-1, (n, self.size)).transpose(1, 2)
        q, k, v = split(a["q_proj"](y), self.heads), split(a["k_proj"](y), self.kv), split(a["v_proj"](y), self.kv)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + a["o_proj"](y.transpose(1, 2).flatten(2))
        y, m = self.post_attention_layernorm(x), self.mlp
        return x + m["down_proj"](F.silu(m["gate_proj"](y)) * m["up_proj"](y))


class Llama(nn.Module):
    def __init__(self, words, d, layers):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(words, d)
        self.model.layers = nn.ModuleList([LlamaLayer(d, 4, 2, 12) for _ in range(layers)])
        self.model.norm = Rms(d)
        self.lm_head = nn.Linear(d, words, bias=False)

    def forward(self, words):
        x = self.model.embed_tokens(words)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


case("llama", lambda: Llama(11, 16, 2), lambda: [torch.randint(0, 11, (2, 5))])


# T5: relative position biases shared by all layers, unscaled attention, one embedding for inputs and logits.
class T5Attention(nn.Module):
    def __init__(self, d, heads, biased):
        super().__init__()
        self.heads = heads
        for n in "qkvo":
            setattr(self, n, nn.Linear(d, d, bias=False))
        if biased:
            self.relative_attention_bias = nn.Embedding(8, heads)

    def forward(self, x, memory, bias):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        scores = q @ k.transpose(-1, -2) + (0 if bias is None else bias)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def buckets(n, both):
    """Returns T5's relative position buckets: 8 buckets, for distances up to 16."""
    far = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    count, base = 8, torch.zeros_like(far)
    if both:
        count //= 2
        base = (far > 0).long() * count
        far = far.abs()
    else:
        far = -far.clamp(max=0)
    exact = count // 2
    large = exact + (torch.log(far.float().clamp(min=1) / exact) / math.log(16 / exact) * (count - exact)).long()
    return base + torch.where(far < exact, far, large.clamp(max=count - 1))


class T5Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class T5Sub(nn.Module):
    def __init__(self, d, name, inner):
        super().__init__()
        setattr(self, name, inner)
        self.layer_norm = T5Norm(d)


class T5Dense(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.wi, self.wo = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)


class T5Block(nn.Module):
    def __init__(self, d, heads, biased, cross):
        super().__init__()
        parts = [T5Sub(d, "SelfAttention", T5Attention(d, heads, biased))]
        if cross:
            parts.append(T5Sub(d, "EncDecAttention", T5Attention(d, heads, False)))
        self.layer = nn.ModuleList(parts + [T5Sub(d, "DenseReluDense", T5Dense(d, 12))])

    def forward(self, x, bias, memory=None):
        sub = self.layer[0]
        y = sub.layer_norm(x)
        x = x + sub.SelfAttention(y, y, bias)
        if memory is not None:
            sub = self.layer[1]
            x = x + sub.EncDecAttention(sub.layer_norm(x), memory, None)
        sub = self.layer[-1]
        return x + sub.DenseReluDense.wo(sub.DenseReluDense.wi(sub.layer_norm(x)).relu())


class T5Stack(nn.Module):
    def __init__(self, table, d, heads, decoder):
        super().__init__()
        self.embed_tokens = table
        self.decoder = decoder
        self.block = nn.ModuleList([T5Block(d, heads, k == 0, decoder) for k in range(2)])
        self.final_layer_norm = T5Norm(d)

    def forward(self, words, memory=None):
        x, n = self.embed_tokens(words), words.shape[1]
        bias = self.block[0].layer[0].SelfAttention.relative_attention_bias(buckets(n, not self.decoder)).permute(2, 0, 1)
        if self.decoder:
            bias = bias + torch.full((n, n), -torch.inf).triu(1)
        for block in self.block:
            x = block(x, bias, memory)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self, words, d, heads):
        super().__init__()
        self.shared = nn.Embedding(words, d)
        self.encoder, self.decoder = T5Stack(self.shared, d, heads, False), T5Stack(self.shared, d, heads, True)
        self.lm_head = nn.Linear(d, words, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source, target):
        return self.lm_head(self.decoder(target, self.encoder(source)) * 8**-0.5)


case("t5", lambda: T5(9, 8, 2), lambda: [torch.randint(0, 9, (2, 6)), torch.randint(0, 9, (2, 5))])


class LanguageModel(nn.Module):
    """PyTorch's word language model: tied weights, LSTM layers with a projection."""
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(13, 6)
        self.rnn = nn.LSTM(6, 10, 2, proj_size=6, bidirectional=False)
        self.decoder = nn.Linear(6, 13)
        self.decoder.weight = self.encoder.weight

    def forward(self, words):
        return self.decoder(self.rnn(self.encoder(words))[0]).log_softmax(-1)


case("lstm_language_model", LanguageModel, lambda: [torch.randint(0, 13, (5, 2))])


class Tagger(nn.Module):
    """Sequence tagger: a bidirectional GRU with a conditional random field, for sentences of several lengths."""
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5, padding_idx=0)
        self.gru = nn.GRU(5, 4, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(8, 3)
        self.transitions = nn.Parameter(torch.randn(3, 3))

    def forward(self, words, tags, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        scores = self.tags(nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=words.shape[1])[0])
        there = torch.arange(words.shape[1])[None, :] < lengths[:, None]
        path = (scores.gather(-1, tags[..., None])[..., 0] * there).sum(1) + (self.transitions[tags[:, :-1], tags[:, 1:]] * there[:, 1:]).sum(1)
        alpha = scores[:, 0]
        for t in range(1, words.shape[1]):
            step = (alpha[:, :, None] + self.transitions).logsumexp(1) + scores[:, t]
            alpha = torch.where(there[:, t, None], step, alpha)
        return alpha.logsumexp(-1) - path, scores


case("gru_tagger", Tagger, lambda: [torch.randint(1, 9, (3, 6)), torch.randint(0, 3, (3, 6)), torch.tensor([4, 6, 2])])


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(9, 8), nn.Embedding(7, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.generator = nn.Linear(8, 7)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
        pad = source == 0
        y = self.transformer(self.source(source), self.target(target), tgt_mask=mask, src_key_padding_mask=pad, memory_key_padding_mask=pad)
        return self.generator(y)


case("seq2seq", Seq2Seq, lambda: [torch.tensor([[1, 2, 3, 0], [4, 8, 7, 6]]), torch.randint(0, 7, (2, 3))])

# DCGAN's generator, and a discriminator with spectral norm.
case("generator", lambda: nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
    nn.ConvTranspose2d(4, 2, 4, 2, 1, bias=False), nn.Tanh()), lambda: [R(2, 6, 1, 1)])
SN = parametrizations.spectral_norm
case("discriminator", lambda: nn.Sequential(
    SN(nn.Conv2d(2, 4, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2), SN(nn.Conv2d(4, 6, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), SN(nn.Linear(24, 1), n_power_iterations=2)),
    lambda: [R(2, 2, 8, 8)], modes=BOTH)


class Speech(nn.Module):
    """wav2vec 2.0: convolutions over a waveform, the first with group norm; positions by a weight_norm convolution."""
    def __init__(self):
        super().__init__()
        self.conv_layers = nn.ModuleList([nn.ModuleDict({"conv": nn.Conv1d(1, 6, 10, 5, bias=False), "layer_norm": nn.GroupNorm(6, 6)}),
                                          nn.ModuleDict({"conv": nn.Conv1d(6, 6, 3, 2, bias=False)})])
        self.projection = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8))
        self.pos_conv_embed = nn.ModuleDict({"conv": parametrizations.weight_norm(nn.Conv1d(8, 8, 4, padding=2, groups=2), dim=2)})
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True), 1, enable_nested_tensor=False)

    def forward(self, wave):
        x = wave[:, None]
        for layer in self.conv_layers:
            x = layer["conv"](x)
            if "layer_norm" in layer:
                x = layer["layer_norm"](x)
            x = F.gelu(x)
        x = self.projection(x.transpose(1, 2))
        y = self.pos_conv_embed["conv"](x.transpose(1, 2))[..., :-1]
        return self.encoder(x + F.gelu(y).transpose(1, 2))


case("speech", Speech, lambda: [R(2, 80)])


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        def mlp(n, between):
            return nn.Sequential(nn.Linear(n, between), nn.GELU(), nn.Linear(between, n))
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm1": nn.LayerNorm(6), "tokens": mlp(4, 5), "norm2": nn.LayerNorm(6), "channels": mlp(6, 8)}) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = x + b["tokens"](b["norm1"](x).transpose(1, 2)).transpose(1, 2)
            x = x + b["channels"](b["norm2"](x))
        return self.head(self.norm(x).mean(1))


case("mixer", Mixer, lambda: [R(2, 3, 8, 8)])


class Distil(nn.Module):
    """DistilBERT, with the names of its published files."""
    def __init__(self):
        super().__init__()
        d = 8
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(9, d, padding_idx=0), "position_embeddings": nn.Embedding(6, d), "LayerNorm": nn.LayerNorm(d, eps=1e-12)})
        layer = lambda: nn.ModuleDict({
            "attention": nn.ModuleDict({f"{n}_lin": nn.Linear(d, d) for n in ("q", "k", "v", "out")}), "sa_layer_norm": nn.LayerNorm(d, eps=1e-12),
            "ffn": nn.ModuleDict({"lin1": nn.Linear(d, 12), "lin2": nn.Linear(12, d)}), "output_layer_norm": nn.LayerNorm(d, eps=1e-12)})
        self.transformer = nn.ModuleDict({"layer": nn.ModuleList([layer() for _ in range(2)])})

    def forward(self, words):
        e, n = self.embeddings, words.shape[1]
        x = e["LayerNorm"](e["word_embeddings"](words) + e["position_embeddings"](torch.arange(n)))
        mask = (words != 0)[:, None, None]
        for b in self.transformer["layer"]:
            split = lambda t: t.unflatten(-1, (2, -1)).transpose(1, 2)
            a = b["attention"]
            y = F.scaled_dot_product_attention(split(a["q_lin"](x)), split(a["k_lin"](x)), split(a["v_lin"](x)), mask)
            x = b["sa_layer_norm"](a["out_lin"](y.transpose(1, 2).flatten(2)) + x)
            x = b["output_layer_norm"](b["ffn"]["lin2"](F.gelu(b["ffn"]["lin1"](x))) + x)
        return x


case("distilbert", Distil, lambda: [torch.tensor([[1, 2, 3, 0, 0], [4, 8, 7, 6, 5]])])

save("tests/modules/architectures.safetensors")
