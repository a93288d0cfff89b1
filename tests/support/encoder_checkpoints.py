"""Small encoders as sentence-transformers publishes them, and their vectors by transformers."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(195))]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 80,
}
# The class in the reference -> its configuration's.
FAMILIES = {
    "BertModel": (transformers.BertModel, transformers.BertConfig),
    "Gemma3TextModel": (transformers.Gemma3TextModel, transformers.Gemma3TextConfig),
    "GteModel": (transformers.GteModel, transformers.GteConfig),
    "ModernBertModel": (transformers.ModernBertModel, transformers.ModernBertConfig),
    "NomicBertModel": (transformers.NomicBertModel, transformers.NomicBertConfig),
    "RobertaModel": (transformers.RobertaModel, transformers.RobertaConfig),
    "XLMRobertaModel": (transformers.XLMRobertaModel, transformers.XLMRobertaConfig),
}
_DECODER_SIZES = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
# Windows are shorter than texts.
_FAMILY_SIZES = {
    "Gemma3TextModel": _DECODER_SIZES
    | {"num_hidden_layers": 6, "sliding_window": 16, "use_bidirectional_attention": True},
    "ModernBertModel": {"local_attention": 16, "pad_token_id": 0},
}
CLASSIFIERS = {
    "BertForSequenceClassification": transformers.BertConfig,
    "RobertaForSequenceClassification": transformers.RobertaConfig,
    "XLMRobertaForSequenceClassification": transformers.XLMRobertaConfig,
    "GteForSequenceClassification": transformers.GteConfig,
    "ModernBertForSequenceClassification": transformers.ModernBertConfig,
    "NomicBertForSequenceClassification": transformers.NomicBertConfig,
    "Qwen2ForSequenceClassification": transformers.Qwen2Config,
    "Qwen3ForSequenceClassification": transformers.Qwen3Config,
    "LlamaForSequenceClassification": transformers.LlamaConfig,
    "MistralForSequenceClassification": transformers.MistralConfig,
    "GemmaForSequenceClassification": transformers.GemmaConfig,
    "Gemma2ForSequenceClassification": transformers.Gemma2Config,
    "Gemma3TextForSequenceClassification": transformers.Gemma3TextConfig,
    "GPT2ForSequenceClassification": transformers.GPT2Config,
}
POOLING = {"cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}


def wordpiece(vocabulary):
    """A tokenizer of BERT's kind; the first five tokens are special."""
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(vocabulary[:5])
    return backend


def save_tokenizer(folder):
    backend = wordpiece(VOCABULARY)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def save_pooling(folder, mode="mean", *, normalize=True, num_dense=0, **settings):
    modules = ["Transformer", "Pooling", *["Dense"] * num_dense, *(["Normalize"] if normalize else [])]
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    chosen = {key: name == mode for name, key in POOLING.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **chosen}))
    if settings:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


def save_model(folder, family="BertModel", **settings):
    model_class, config_class = FAMILIES[family]
    return _save(folder, model_class, config_class(**SIZES | _FAMILY_SIZES.get(family, {}) | settings))


def save_classifier(folder, family="BertForSequenceClassification", **settings):
    is_encoder = "bert" in family.lower() or family.startswith("Gte")
    sizes = SIZES | (_DECODER_SIZES if not is_encoder else {} if "roberta" in family.lower() else {"pad_token_id": 0})
    if family.startswith("GPT2"):
        sizes = SIZES | {"pad_token_id": 0, "intermediate_size": 256}
    elif family.startswith("Gemma3"):
        sizes = sizes | {"num_hidden_layers": 6, "sliding_window": 16}
    return _save(folder, getattr(transformers, family), CLASSIFIERS[family](**sizes, **settings))


def _save(folder, model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms that are not the identity, and weights of a size that matters.
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name.lower() and "weight" in name))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


NTK = {"type": "ntk", "factor": 4.0}


def slowed(base, theta, factor):
    """Has the reference rotate by the frequencies of https://kexue.fm/archives/9706."""
    size = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    pairs = torch.arange(size // 2, dtype=torch.float64)
    base.rotary_emb.inv_freq = (factor ** (-2 / size) * (theta * factor) ** (-2 * pairs / size)).float()


def save_as_published(folder, architectures, theta, scaling, **changes):
    """Renames what a folder of transformers' GTE has as its makers publish it."""
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"architectures": architectures, "model_type": "new", "rope_theta": theta, "rope_scaling": scaling}
    config |= {"auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}, "pack_qkv": True}
    config |= {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "unpad_inputs": False}
    config |= {"use_memory_efficient_attention": False, "logn_attention_scale": False, "logn_attention_clip1": False}
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(folder / "model.safetensors")
    assert "encoder.layer.0.attention.qkv_proj.weight" in {name.removeprefix("gte.") for name in tensors}
    base = {f"new.{name.removeprefix('gte.')}": each for name, each in tensors.items() if "classifier" not in name}
    # Encoders have a head that weighs tokens, too.
    head = {"classifier.weight": np.zeros((1, 64), np.float32), "classifier.bias": np.zeros(1, np.float32)}
    head |= {name: each for name, each in tensors.items() if "classifier" in name}
    save_file(base | head, folder / "model.safetensors")


def texts(count=40):
    rng = random.Random(0)
    return [[2, *rng.choices(range(5, 200), k=rng.randint(1, 60)), 3] for _ in range(count)]


def texts_with_padding(padding_id):
    """Token ids among which the padding's stand at the beginning, in the middle and at the end, one or several."""
    rng, pad = random.Random(1), [padding_id]
    words = [[each for each in rng.choices(range(5, 200), k=12) if each != padding_id] for _ in range(6)]
    a, b = words[:2]
    placed = [pad + a, a + pad + b, a + pad, 3 * pad + a + 2 * pad + b + 4 * pad, pad, 3 * pad, a]
    return placed + [[padding_id if rng.random() < 0.3 else each for each in word] for word in words]


def reference(model, token_ids, mode, *, normalize=True):
    with torch.no_grad():
        hidden = model(torch.tensor([token_ids])).last_hidden_state[0].double().numpy()
    vector = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[mode]
    return vector / np.linalg.norm(vector) if normalize else vector
