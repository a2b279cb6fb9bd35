"""Creates tests/modules/modules.safetensors: results and gradients of PyTorch's modules, for the conformance suite.

    python benches/peers/modules.py [tests/modules/modules.safetensors]

Needs torch, safetensors and numpy; runs on the CPU. cases.py documents the names of the tensors.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from torch.nn.utils import parametrizations

from cases import case, data, save

R = torch.randn
BOTH = ("train", "eval")

# Attention.
def mha(name, inputs, *args, masks=None, weights=False, causal=False, **options):
    def call(m, q, k=None, v=None, *more):
        k, v = (q, q) if k is None else (k, v)
        mask = dict(masks or {})
        for key in list(mask):
            mask[key] = more[0] if isinstance(mask[key], int) else mask[key]
        if causal:
            n, s = (q.shape[-2], k.shape[-2]) if options.get("batch_first") or q.dim() == 2 else (q.shape[0], k.shape[0])
            mask["attn_mask"] = torch.ones(n, s, dtype=torch.bool).triu(1)
        y, w = m(q, k, v, need_weights=weights, average_attn_weights=False, **mask)
        return (y, w) if weights else y
    case(name, lambda: nn.MultiheadAttention(*args, **options), inputs, call, BOTH if name == "mha" else ("train",))

mha("mha", lambda: [R(5, 2, 8)], 8, 2)
mha("mha_batch_first", lambda: [R(2, 5, 8)], 8, 2, batch_first=True, causal=True)
mha("mha_unbatched", lambda: [R(4, 8), R(6, 8), R(6, 8)], 8, 2)
mha("mha_cross", lambda: [R(2, 4, 8), R(2, 6, 5), R(2, 6, 7)], 8, 2, kdim=5, vdim=7, batch_first=True, bias=False)
mha("mha_behind", lambda: [R(2, 4, 8), R(2, 6, 8), R(2, 6, 8)], 8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True, causal=True)
PAD = torch.tensor([[False, False, False, True, True], [False, False, False, False, False]])
data["masks/padding"] = PAD
torch.manual_seed(1)
ADDED = R(4, 5, 5)
data["masks/added"] = ADDED
HIDES = torch.tensor([[False, True, False, False, True]] * 5) & ~torch.eye(5, dtype=torch.bool)
data["masks/hides"] = HIDES
mha("mha_padded", lambda: [R(2, 5, 8)], 8, 2, batch_first=True, masks=dict(key_padding_mask=PAD, attn_mask=HIDES))
mha("mha_added", lambda: [R(2, 5, 8)], 8, 2, batch_first=True, masks=dict(key_padding_mask=torch.zeros(2, 5).masked_fill(PAD, -torch.inf), attn_mask=ADDED))
mha("mha_weights", lambda: [R(5, 2, 8)], 8, 2, weights=True, masks=dict(key_padding_mask=PAD))
mha("mha_weights_causal", lambda: [R(4, 8)], 8, 2, weights=True, causal=True)

LAYER = dict(d_model=8, nhead=2, dim_feedforward=12, dropout=0.0)
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
case("encoder_layer", lambda: nn.TransformerEncoderLayer(**LAYER), lambda: [R(5, 2, 8)], modes=BOTH)
case("encoder_layer_norm_first", lambda: nn.TransformerEncoderLayer(**LAYER, norm_first=True, activation="gelu", batch_first=True, bias=False, layer_norm_eps=1e-3),
     lambda: [R(2, 5, 8)], lambda m, x: m(x, src_mask=CAUSAL, src_key_padding_mask=PAD))
case("decoder_layer", lambda: nn.TransformerDecoderLayer(**LAYER), lambda: [R(5, 2, 8), R(3, 2, 8)], lambda m, x, y: m(x, y, tgt_mask=CAUSAL), BOTH)
case("decoder_layer_norm_first", lambda: nn.TransformerDecoderLayer(**LAYER, norm_first=True, activation="gelu", batch_first=True),
     lambda: [R(2, 3, 8), R(2, 5, 8)], lambda m, x, y: m(x, y, memory_key_padding_mask=PAD))
case("encoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER, batch_first=True), 2, nn.LayerNorm(8), enable_nested_tensor=False),
     lambda: [R(2, 5, 8)], lambda m, x: m(x, src_key_padding_mask=PAD))
case("decoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2), lambda: [R(5, 2, 8), R(3, 2, 8)], lambda m, x, y: m(x, y, tgt_mask=CAUSAL))
case("transformer", lambda: nn.Transformer(8, 2, 1, 2, 12, 0.0, batch_first=True), lambda: [R(2, 4, 8), R(2, 5, 8)],
     lambda m, x, y: m(x, y, tgt_mask=CAUSAL))


# Positional encodings.
def rotate(x, interleaved, turned, start=0):
    n, pairs = x.shape[-2], turned // 2
    angle = torch.arange(start, start + n, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    y, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        y = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = y[..., :pairs], y[..., pairs:]
        y = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([y, rest], -1)


case("rotary", None, lambda: [R(2, 3, 5, 8)], lambda m, x: rotate(x, False, 8))
case("rotary_interleaved", None, lambda: [R(2, 5, 8)], lambda m, x: rotate(x, True, 8, 3))
case("rotary_partial", None, lambda: [R(2, 5, 7)], lambda m, x: rotate(x, False, 4))


def sinusoids(x):
    n, d = x.shape[-2:]
    angle = torch.arange(n, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(x.dtype)


case("sinusoidal", None, lambda: [R(2, 5, 6)], lambda m, x: sinusoids(x))

# Recurrent layers.
for kind, layer, cell in [("rnn", nn.RNN, nn.RNNCell), ("lstm", nn.LSTM, nn.LSTMCell), ("gru", nn.GRU, nn.GRUCell)]:
    lstm = kind == "lstm"
    def flat(m, x, *state):
        state = (state if lstm else state[0]) if state else None
        out, s = m(x, state)
        return (out, *s) if lstm else (out, s)
    case(kind, lambda: layer(3, 4), lambda: [R(5, 2, 3)], flat, BOTH)
    case(f"{kind}_deep", lambda: layer(3, 4, num_layers=2, bidirectional=True, batch_first=True),
         lambda: [R(2, 5, 3), R(4, 2, 4)] + ([R(4, 2, 4)] if lstm else []), flat)
    case(f"{kind}_unbatched", lambda: layer(3, 4, bias=False), lambda: [R(5, 3), R(1, 4)] + ([R(1, 4)] if lstm else []), flat)
    def packed(m, x, *state, batch_first=False):
        state = (state if lstm else state[0]) if state else None
        p = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 5, 1]), enforce_sorted=False, batch_first=batch_first)
        out, s = m(p, state)
        out = nn.utils.rnn.pad_packed_sequence(out, total_length=5, batch_first=batch_first)[0]
        return (out, *s) if lstm else (out, s)
    case(f"{kind}_lengths", lambda: layer(3, 4, num_layers=2, bidirectional=True),
         lambda: [R(5, 3, 3), R(4, 3, 4)] + ([R(4, 3, 4)] if lstm else []), packed)
    def step(m, x, *state):
        return m(x, state if lstm else state[0])
    case(f"{kind}_cell", lambda: cell(3, 4), lambda: [R(2, 3), R(2, 4)] + ([R(2, 4)] if lstm else []), step)
    case(f"{kind}_cell_unbatched", lambda: cell(3, 4, bias=False), lambda: [R(3)], lambda m, x: m(x))
    if lstm:
        case("lstm_proj", lambda: layer(3, 5, num_layers=2, bidirectional=True, proj_size=2), lambda: [R(4, 2, 3), R(4, 2, 2), R(4, 2, 5)], flat)
        case("lstm_proj_lengths", lambda: layer(3, 5, bidirectional=True, proj_size=2), lambda: [R(5, 3, 3), R(2, 3, 2), R(2, 3, 5)], packed)
case("rnn_relu", lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True), lambda: [R(5, 2, 3)], lambda m, x: m(x))
case("rnn_cell_relu", lambda: nn.RNNCell(3, 4, nonlinearity="relu"), lambda: [R(2, 3), R(2, 4)])

# Norms.
case("layer_norm", lambda: nn.LayerNorm([3, 4]), lambda: [R(2, 3, 4)])
case("rms_norm", lambda: nn.RMSNorm(6), lambda: [R(2, 3, 6)])
case("group_norm", lambda: nn.GroupNorm(2, 4), lambda: [R(2, 4, 3)])
case("batch_norm1d", lambda: nn.BatchNorm1d(3), lambda: [R(4, 3)], modes=BOTH)
case("batch_norm2d", lambda: nn.BatchNorm2d(3, momentum=0.3, eps=1e-3), lambda: [R(2, 3, 4, 3)], modes=BOTH)
case("batch_norm3d", lambda: nn.BatchNorm3d(2), lambda: [R(2, 2, 2, 3, 2)], modes=BOTH)
case("instance_norm1d", lambda: nn.InstanceNorm1d(3), lambda: [R(2, 3, 5)], modes=BOTH)
case("instance_norm2d", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), lambda: [R(2, 3, 4, 3)], modes=BOTH)
case("instance_norm3d", lambda: nn.InstanceNorm3d(2, affine=True), lambda: [R(2, 2, 3, 2)])
case("local_response_norm", lambda: nn.LocalResponseNorm(3, alpha=0.1), lambda: [R(2, 5, 4)])

case("batch_norm1d_plain", lambda: nn.BatchNorm1d(3, affine=False), lambda: [R(4, 3)], modes=BOTH)
case("batch_norm2d_batch", lambda: nn.BatchNorm2d(3, track_running_stats=False), lambda: [R(2, 3, 4, 3)], modes=BOTH)
case("layer_norm_no_bias", lambda: nn.LayerNorm(4, eps=1e-3, bias=False), lambda: [R(2, 3, 4)])

# Parametrised weights.
WN, SN = parametrizations.weight_norm, parametrizations.spectral_norm
case("weight_norm", lambda: WN(nn.Linear(4, 3)), lambda: [R(2, 4)])
case("weight_norm_all", lambda: WN(nn.Conv1d(2, 3, 2, bias=False), dim=None), lambda: [R(2, 2, 5)])
case("weight_norm_transpose", lambda: WN(nn.ConvTranspose2d(2, 3, 2), dim=1), lambda: [R(1, 2, 3, 2)])
case("spectral_norm", lambda: SN(nn.Linear(4, 3)), lambda: [R(2, 4)], modes=BOTH)
case("spectral_norm_transpose", lambda: SN(nn.ConvTranspose1d(3, 4, 2, groups=1), n_power_iterations=3, eps=1e-6), lambda: [R(2, 3, 4)], modes=BOTH)

# Convolutions, embeddings, bilinear.
case("conv1d_same", lambda: nn.Conv1d(2, 3, 4, padding="same"), lambda: [R(2, 2, 6)])
case("conv2d_same_reflect", lambda: nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 1), padding_mode="reflect"), lambda: [R(1, 2, 6, 5)])
case("embedding_max_norm", lambda: nn.Embedding(7, 3, max_norm=0.9), lambda: [torch.tensor([[1, 2], [2, 6], [1, 0]])], modes=BOTH)
case("embedding_max_norm_one", lambda: nn.Embedding(7, 3, max_norm=0.9, norm_type=1.0), lambda: [torch.tensor([4, 2])])
case("embedding_bag_max_norm", lambda: nn.EmbeddingBag(7, 3, max_norm=0.9, mode="sum"), lambda: [torch.tensor([[1, 2], [2, 6], [1, 0]])])
case("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, groups=2), lambda: [R(2, 4, 7)])
case("conv1d_circular", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), lambda: [R(2, 2, 6)])
case("conv2d_reflect", lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 2), padding_mode="reflect", bias=False), lambda: [R(1, 2, 4, 5)])
case("conv3d", lambda: nn.Conv3d(2, 3, 2, dilation=(1, 2, 1)), lambda: [R(1, 2, 3, 4, 3)])
case("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), lambda: [R(2, 4, 4)])
case("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1), padding=(1, 0, 0)), lambda: [R(1, 2, 3, 2, 2)])
case("embedding", lambda: nn.Embedding(7, 3, padding_idx=2), lambda: [torch.tensor([[1, 2], [2, 6], [1, 0]])])
case("bilinear", lambda: nn.Bilinear(3, 4, 2), lambda: [R(5, 3), R(5, 4)])

# Activations. Inputs avoid points where the slope jumps.
X = lambda: [torch.where((x := R(3, 6) * 2).abs() < 0.05, x + 0.2, x)]
for name, layer in dict(
    relu=nn.ReLU(), relu6=nn.ReLU6(), leaky_relu=nn.LeakyReLU(), elu=nn.ELU(), celu=nn.CELU(1.5), selu=nn.SELU(), gelu=nn.GELU(),
    gelu_tanh=nn.GELU("tanh"), silu=nn.SiLU(), mish=nn.Mish(), sigmoid=nn.Sigmoid(), log_sigmoid=nn.LogSigmoid(), softplus=nn.Softplus(2.0),
    softsign=nn.Softsign(), softshrink=nn.Softshrink(), hardshrink=nn.Hardshrink(), tanhshrink=nn.Tanhshrink(), tanh=nn.Tanh(),
    hardtanh=nn.Hardtanh(-0.7, 1.2), hardsigmoid=nn.Hardsigmoid(), hardswish=nn.Hardswish(), glu=nn.GLU(), threshold=nn.Threshold(0.3, 7.0),
    softmax=nn.Softmax(0), log_softmax=nn.LogSoftmax(-1), softmin=nn.Softmin(1)).items():
    case(name, layer, X)
case("softmax2d", nn.Softmax2d(), lambda: [R(2, 3, 2, 2)])
case("prelu", lambda: nn.PReLU(3), lambda: [R(2, 3, 4)])
case("rrelu", lambda: nn.RReLU(), X, modes=("eval",))

case("adaptive_log_softmax", lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7], div_value=2.0), lambda: [R(5, 6), torch.tensor([0, 4, 10, 6, 2])], lambda m, *x: tuple(m(*x)))
case("adaptive_log_softmax_bias", lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7, 9], div_value=2.0, head_bias=True), lambda: [R(6), torch.tensor(4)], lambda m, x, y: (*m(x, y), m.log_prob(x[None]), m.predict(x[None])))

# Losses.
LABELS = lambda: torch.tensor([1, 0, 4, 2])
SIGNS = lambda *n: torch.randint(0, 2, n).float() * 2 - 1
for name, loss, inputs, fixed in [
    ("mse_loss", nn.MSELoss(), lambda: [R(4, 5), R(4, 5)], ()),
    ("l1_loss", nn.L1Loss(reduction="sum"), lambda: [R(4, 5), R(4, 5)], ()),
    ("smooth_l1_loss", nn.SmoothL1Loss(beta=0.6), lambda: [R(4, 5), R(4, 5)], ()),
    ("huber_loss", nn.HuberLoss(reduction="none", delta=0.8), lambda: [R(4, 5), R(4, 5)], ()),
    ("cross_entropy_loss", nn.CrossEntropyLoss(torch.rand(5) + 0.5, ignore_index=4, label_smoothing=0.1), lambda: [R(4, 5), LABELS()], ()),
    ("nll_loss", nn.NLLLoss(torch.rand(5) + 0.5, ignore_index=0), lambda: [R(4, 5), LABELS()], ()),
    ("nll_loss_sum", nn.NLLLoss(reduction="sum"), lambda: [R(4, 5, 2), torch.randint(0, 5, (4, 2))], ()),
    ("bce_loss", nn.BCELoss(), lambda: [torch.rand(4, 5) * 0.9 + 0.05, torch.rand(4, 5)], (1,)),
    ("bce_with_logits_loss", nn.BCEWithLogitsLoss(torch.rand(5), pos_weight=torch.rand(5) + 1), lambda: [R(4, 5), torch.rand(4, 5)], (1,)),
    ("kl_div_loss", nn.KLDivLoss(reduction="batchmean"), lambda: [R(4, 5), torch.rand(4, 5) + 0.1], (1,)),
    ("kl_div_loss_log", nn.KLDivLoss(reduction="sum", log_target=True), lambda: [R(4, 5), R(4, 5)], ()),
    ("poisson_nll_loss", nn.PoissonNLLLoss(full=True), lambda: [R(4, 5), torch.randint(0, 6, (4, 5)).float()], (1,)),
    ("poisson_nll_loss_plain", nn.PoissonNLLLoss(log_input=False, reduction="none"), lambda: [torch.rand(4, 5) + 0.2, torch.randint(0, 6, (4, 5)).float()], (1,)),
    ("gaussian_nll_loss", nn.GaussianNLLLoss(full=True), lambda: [R(4, 5), R(4, 5), torch.rand(4, 5) + 0.1], ()),
    ("soft_margin_loss", nn.SoftMarginLoss(), lambda: [R(4, 5), SIGNS(4, 5)], (1,)),
    ("margin_ranking_loss", nn.MarginRankingLoss(0.3), lambda: [R(9), R(9), SIGNS(9)], (2,)),
    ("hinge_embedding_loss", nn.HingeEmbeddingLoss(0.8), lambda: [R(4, 5), SIGNS(4, 5)], (1,)),
    ("cosine_embedding_loss", nn.CosineEmbeddingLoss(0.1), lambda: [R(6, 5), R(6, 5), SIGNS(6)], (2,)),
    ("cosine_embedding_loss_one", nn.CosineEmbeddingLoss(reduction="none"), lambda: [R(5), R(5), torch.tensor(1.0)], (2,)),
    ("triplet_margin_loss", nn.TripletMarginLoss(1.5, swap=True), lambda: [R(6, 5), R(6, 5), R(6, 5)], ()),
    ("triplet_margin_with_distance_loss", nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: (a - b).abs().sum(-1), margin=2.0), lambda: [R(6, 5), R(6, 5), R(6, 5)], ()),
    ("multi_margin_loss", nn.MultiMarginLoss(margin=0.7, weight=torch.rand(5) + 0.5), lambda: [R(4, 5), LABELS()], ()),
    ("multi_margin_loss_squares", nn.MultiMarginLoss(p=2, reduction="none"), lambda: [R(4, 5), LABELS()], ()),
    ("multi_margin_loss_one", nn.MultiMarginLoss(), lambda: [R(5), torch.tensor(3)], ()),
    ("multilabel_margin_loss", nn.MultiLabelMarginLoss(reduction="none"), lambda: [R(3, 5), torch.tensor([[3, 0, -1, 1, 2], [4, -1, 0, 0, 0], [0, 1, 2, 3, 4]])], ()),
    ("multilabel_margin_loss_one", nn.MultiLabelMarginLoss(), lambda: [R(5), torch.tensor([3, 0, -1, 1, 2])], ()),
    ("multilabel_soft_margin_loss", nn.MultiLabelSoftMarginLoss(torch.rand(5)), lambda: [R(4, 5), torch.randint(0, 2, (4, 5)).float()], (1,)),
    ("cosine_similarity", nn.CosineSimilarity(), lambda: [R(4, 5), R(4, 5)], ()),
    ("pairwise_distance", nn.PairwiseDistance(3.0, keepdim=True), lambda: [R(4, 5), R(4, 5)], ()),
]:
    case(name, loss, inputs, fixed=fixed)
CTC = lambda: [R(9, 3, 5), torch.tensor([[1, 2, 2, 4], [3, 3, 0, 0], [4, 1, 2, 3]]), torch.tensor([9, 7, 3]), torch.tensor([4, 2, 0])]
case("ctc_loss", lambda: nn.CTCLoss(), CTC, lambda m, x, *more: m(x.log_softmax(-1), *more))
case("ctc_loss_none", lambda: nn.CTCLoss(blank=2, reduction="none", zero_infinity=True),
     lambda: [R(5, 3, 5), torch.tensor([[1, 1, 1, 4], [3, 3, 0, 0], [4, 1, 0, 3]]), torch.tensor([5, 5, 4]), torch.tensor([4, 2, 4])],
     lambda m, x, *more: m(x.log_softmax(-1), *more))

# Pooling.
case("max_pool1d", nn.MaxPool1d(3, 2, 1), lambda: [R(2, 3, 8)])
case("max_pool2d", nn.MaxPool2d((2, 3), 1, dilation=(2, 1)), lambda: [R(2, 2, 5, 6)])
case("max_pool3d", nn.MaxPool3d((2, 3, 2), (1, 2, 2), (1, 1, 0), ceil_mode=True), lambda: [R(1, 2, 4, 5, 5)])
case("avg_pool1d", nn.AvgPool1d(3, 2, 1, count_include_pad=False), lambda: [R(2, 3, 8)])
case("avg_pool2d", nn.AvgPool2d(2, 1), lambda: [R(2, 2, 4, 4)])
case("avg_pool3d", nn.AvgPool3d((2, 3, 2), 2, (1, 1, 0), count_include_pad=False, ceil_mode=True), lambda: [R(1, 2, 4, 5, 5)])
case("avg_pool3d_divisor", nn.AvgPool3d(2, divisor_override=5), lambda: [R(2, 4, 4, 4)])
case("lp_pool1d", nn.LPPool1d(2.0, 3, 2), lambda: [R(2, 3, 8)])
case("lp_pool2d", nn.LPPool2d(3.0, 2), lambda: [torch.rand(2, 3, 4, 4) + 0.1])
case("adaptive_avg_pool1d", nn.AdaptiveAvgPool1d(3), lambda: [R(2, 3, 8)])
case("adaptive_avg_pool2d", nn.AdaptiveAvgPool2d((2, 3)), lambda: [R(2, 2, 5, 4)])
case("adaptive_avg_pool3d", nn.AdaptiveAvgPool3d((2, 3, 2)), lambda: [R(1, 2, 5, 4, 3)])
case("adaptive_max_pool1d", nn.AdaptiveMaxPool1d(3), lambda: [R(2, 3, 8)])
case("adaptive_max_pool2d", nn.AdaptiveMaxPool2d((2, 3)), lambda: [R(2, 2, 5, 4)])
case("adaptive_max_pool3d", nn.AdaptiveMaxPool3d((2, 3, 2)), lambda: [R(1, 2, 5, 4, 3)])

case("lp_pool3d", nn.LPPool3d(3.0, (2, 1, 2), 1), lambda: [torch.rand(2, 3, 4, 3, 4) + 0.1])
case("max_pool3d_indices", nn.MaxPool3d((2, 3, 2), (1, 2, 2), (1, 1, 0), ceil_mode=True, return_indices=True), lambda: [R(2, 2, 4, 5, 5)])
case("max_pool3d_indices_ties", nn.MaxPool3d((2, 3, 2), 1, return_indices=True), lambda: [torch.randint(0, 3, (2, 4, 5, 5)).float()])
case("max_unpool1d", lambda: nn.MaxUnpool1d(3, 2, 1), lambda: [R(2, 3, 4)], lambda m, x: m(x, torch.arange(4).expand(2, 3, 4) * 2))
for n, pool in [(2, (3, 2)), (3, (2, 3, 2))]:
    def back(m, x, n=n, pool=pool):
        y, places = getattr(F, f"max_pool{n}d")(x, pool, return_indices=True)
        return m(y, places, output_size=x.shape[2:])
    case(f"max_unpool{n}d", getattr(nn, f"MaxUnpool{n}d")(pool), lambda: [R(2, 2, *[5, 7, 4][:n])], back)
    def drawn(m, x, samples, n=n):
        size = dict(output_size=(4, 3)) if n == 2 else dict(output_ratio=(0.5, 0.6, 0.7))
        return getattr(F, f"fractional_max_pool{n}d")(x, 2, **size, return_indices=True, _random_samples=samples)
    case(f"fractional_max_pool{n}d", None, lambda: [R(2, 3, *[8, 6, 7][:n]), torch.rand(2, 3, n)], drawn, fixed=(1,))

# Grid sampling. Points avoid pixel edges, where the slope jumps.
GRID = lambda *n: torch.rand(*n) * 3.1 - 1.55
for padding in ("zeros", "border", "reflection"):
    for mode in ("bilinear", "nearest"):
        for align in (False, True):
            case(f"grid_sample_{padding}_{mode}_{int(align)}", None, lambda: [R(2, 3, 4, 5), GRID(2, 3, 4, 2)],
                 lambda m, x, g, o=dict(mode=mode, padding_mode=padding, align_corners=align): F.grid_sample(x, g, **o), fixed=(1,) if mode == "nearest" else ())
case("grid_sample_volume", None, lambda: [R(2, 2, 3, 4, 5), GRID(2, 2, 3, 2, 3)], lambda m, x, g: F.grid_sample(x, g, padding_mode="reflection", align_corners=False))
case("affine_grid", None, lambda: [R(2, 2, 3)], lambda m, x: F.affine_grid(x, (2, 1, 3, 4), align_corners=False))
case("affine_grid_volume", None, lambda: [R(2, 3, 4)], lambda m, x: F.affine_grid(x, (2, 1, 3, 1, 2), align_corners=True))
case("pdist", None, lambda: [R(5, 3)], lambda m, x: F.pdist(x))
# Absolute values: signs of singular vectors are arbitrary.
for kind, shape in dict(tall=(2, 5, 3), wide=(3, 4), square=(4, 4)).items():
    def magnitudes(m, x):
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u.abs(), s, vh.abs(), u * s[..., None, :] @ vh
    case(f"svd_{kind}", None, lambda: [R(*shape)], magnitudes)
case("pdist_ones", None, lambda: [R(4, 3)], lambda m, x: F.pdist(x, 1.0))

# Indices.
case("zero_pad1d", nn.ZeroPad1d((1, 2)), lambda: [R(2, 2, 3)])
case("zero_pad2d", nn.ZeroPad2d((1, -1, 0, 2)), lambda: [R(1, 2, 3, 3)])
case("zero_pad3d", nn.ZeroPad3d(1), lambda: [R(1, 2, 2, 2, 2)])
case("constant_pad1d", nn.ConstantPad1d(2, 1.5), lambda: [R(2, 2, 3)])
case("constant_pad2d", nn.ConstantPad2d((1, 0, 2, 1), -2.0), lambda: [R(1, 2, 3, 3)])
case("constant_pad3d", nn.ConstantPad3d(1, 3.0), lambda: [R(1, 1, 2, 2, 2)])
for n in (1, 2, 3):
    for kind in ("Reflection", "Replication", "Circular"):
        pads = tuple([1, 2, 0, 1, 2, 1][: 2 * n])
        case(f"{kind.lower()}_pad{n}d", getattr(nn, f"{kind}Pad{n}d")(pads), lambda: [R(1, 2, *[3, 4, 3][:n])])
case("flatten", nn.Flatten(), lambda: [R(2, 3, 4)])
case("unflatten", nn.Unflatten(1, (2, -1)), lambda: [R(2, 6, 3)])
case("pixel_shuffle", nn.PixelShuffle(2), lambda: [R(1, 8, 2, 3)])
case("pixel_unshuffle", nn.PixelUnshuffle(2), lambda: [R(2, 4, 6)])
case("channel_shuffle", nn.ChannelShuffle(2), lambda: [R(2, 6, 3)])
case("unfold", nn.Unfold((2, 3), padding=1, stride=2), lambda: [R(2, 2, 4, 5)])
case("fold", nn.Fold((4, 5), (2, 3), padding=1, stride=2), lambda: [R(2, 12, 9)])

save("tests/modules/modules.safetensors")
