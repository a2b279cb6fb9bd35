"""Creates tests/minilm: tokens and vectors of some sentences by sentence-transformers with MiniLM's published weights.

    python benches/peers/minilm.py FOLDER [tests/minilm]

FOLDER is the download of `cargo xtask embed` (.forebay/minilm). Needs sentence-transformers; runs on the CPU.
"""
import json
import sys

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, models

SENTENCES = [
    "The cat sits on the mat.",
    "A kitten is resting on a rug.",
    "How do I train a neural network?",
    "What is the best way to fit a deep learning model?",
    "The stock market fell sharply today.",
    "Shares lost much of their value this afternoon, to the surprise of analysts.",
    "Ünïcödé, CAPITALS and 12,345 numbers: 你好!",
    "a",
]
# Only its tokens are recorded: software drivers would take too long to compute its vector.
LONG = " ".join(["A long text that has to be cut somewhere, because it is longer than the model takes."] * 20)

folder = sys.argv[1]
out = sys.argv[2] if len(sys.argv) > 2 else "tests/minilm"
words = models.Transformer(folder, max_seq_length=256)
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension()), models.Normalize()], device="cpu")
model.eval()
features = model.tokenize(SENTENCES)
with torch.no_grad():
    whole = model.encode(SENTENCES, convert_to_tensor=True, batch_size=len(SENTENCES))
    inputs = {k: features[k] for k in ("input_ids", "attention_mask")}
    pooled = words.auto_model(**inputs, return_dict=True).pooler_output
assert torch.allclose(whole.norm(dim=1), torch.ones(len(SENTENCES)), atol=1e-5)
save_file(
    {
        "tokens": features["input_ids"].to(torch.int32).contiguous(),
        "mask": features["attention_mask"].to(torch.int32).contiguous(),
        "embeddings": whole.contiguous(),
        "pooled": pooled.contiguous(),
    },
    f"{out}/embeddings.safetensors",
)
with open(f"{out}/tokens.json", "w") as file:
    long = model.tokenize([LONG])["input_ids"].tolist()
    json.dump({"sentences": SENTENCES, "tokens": features["input_ids"].tolist(), "long": [LONG], "long_tokens": long}, file)
    file.write("\n")
print(whole @ whole.T)
