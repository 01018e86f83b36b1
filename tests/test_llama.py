"""Llama 3: its layers against finite differences, the model against transformers, files, folders, text."""

import itertools
import json

import numpy as np
import pytest

import export_weights
import generate
import train_llama3 as t
import vocabulary
from conftest import assert_one_line_error, run_program
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import open_tokens
from llmc.errors import UserError
from rounding import check_tensor
from test_layers import assert_gradients, nan, normal

CONFIG = t.Config(maxT=64, V=131, L=2, NH=4, NKV=2, C=48, Vp=256, F=40, HS=16)


@pytest.mark.parametrize("B, T, C", ((1, 1, 6), (3, 7, 10), (2, 65, 12)))
def test_rmsnorm(B, T, C):
    inp, weight, dout, eps = normal(B, T, C), normal(C, seed=1), normal(B, T, C, seed=3), 1e-5

    def forward():
        t.rmsnorm_forward(out, rstd, inp, weight, eps, B, T, C)
        return out

    out, rstd = nan(B, T, C), nan(B, T)
    expected = inp / np.sqrt(np.square(inp).mean(-1, keepdims=True) + eps) * weight
    assert check_tensor("out", forward(), expected, 1e-6)
    start = normal(B, T, C, seed=4)
    dinp, dweight = start.copy(), nan(C)
    t.rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B, T, C)
    assert_gradients(forward, dout, dinp=(dinp - start, inp), dweight=(dweight, weight))


@pytest.mark.parametrize("factor", (0, 8))
def test_rope(factor):
    """Of pairs as complex numbers; what is beyond the queries and keys stays."""
    B, T, heads, HS, K = 2, 9, 3, 8, 4
    config = t.Config(maxT=T, V=9, L=1, NH=1, NKV=1, C=8, Vp=128, F=8, HS=HS, theta=100.0, factor=factor, original=16)
    table, x = t.rope_table(config, T), normal(B, T, heads * HS + K)
    frequency = 100.0 ** (-np.arange(0, HS, 2) / HS)
    if factor:
        kept = np.clip((16 * frequency / (2 * np.pi) - 1) / 3, 0, 1)
        frequency = (1 - kept) * frequency / factor + kept * frequency
    angles = np.arange(T)[:, None] * frequency
    pairs = x[..., : heads * HS].reshape(B, T, heads, HS // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate((np.stack((turned.real, turned.imag), -1).reshape(B, T, -1), x[..., heads * HS :]), -1)
    got = x.copy()
    t.rope_forward(got, *table, B, T, heads, HS)
    assert check_tensor("out", got, expected, 1e-5)
    t.rope_backward(got, *table, B, T, heads, HS)
    assert check_tensor("back", got, x, 1e-5), "a rotation's gradient is the rotation back"


@pytest.mark.parametrize("B, T, NH, NKV, HS", ((1, 1, 1, 1, 2), (2, 5, 4, 2, 4), (1, 17, 6, 1, 2)))
def test_attention_of_groups(B, T, NH, NKV, HS):
    """As with each group's keys and values repeated; the cache computes the same."""
    inp, dout = normal(B, T, (NH + 2 * NKV) * HS), normal(B, T, NH * HS, seed=3)

    def forward():
        t.attention_forward(out, att, inp, B, T, NH, NKV, HS)
        return out

    out, att, datt, dinp = nan(B, T, NH * HS), nan(B, NH, T, T), nan(B, NH, T, T), np.full_like(inp, np.nan)
    forward()
    heads = inp.reshape(B, T, -1, HS).swapaxes(1, 2)
    query, key, value = heads[:, :NH], *(np.repeat(x, NH // NKV, 1) for x in (heads[:, NH:-NKV], heads[:, -NKV:]))
    scores = np.where(np.tri(T, dtype=bool), query @ key.swapaxes(2, 3) / np.sqrt(HS), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert check_tensor("out", out, (weights @ value).swapaxes(1, 2).reshape(out.shape), 1e-6)
    t.attention_backward(dinp, datt, dout, inp, att, B, T, NH, NKV, HS)
    assert_gradients(forward, dout, dinp=(dinp, inp))
    forward()
    keys, values, decoded = nan(B, NKV, T, HS), nan(B, NKV, T, HS), nan(B, T, NH * HS)
    for begin, end in itertools.pairwise(sorted({0, T // 2, T})):
        part = np.ascontiguousarray(decoded[:, begin:end])
        t.attention_forward(part, nan(B, NH, end - begin, end), inp[:, begin:end].copy(), B, end - begin, NH, NKV, HS,
                            keys, values, begin)
        decoded[:, begin:end] = part
    assert check_tensor("decoded", decoded, out, 1e-6)


@pytest.mark.parametrize("N, F", ((1, 3), (7, 5), (300, 500)))
def test_swiglu(N, F):
    inp, dout = normal(N, 2 * F), normal(N, F, seed=3)

    def forward():
        t.swiglu_forward(out, inp, N, F)
        return out

    out, dinp = nan(N, F), nan(N, 2 * F)
    up, gate = inp[:, :F], inp[:, F:]
    assert check_tensor("out", forward(), up * gate / (1 + np.exp(-gate)), 1e-6)
    t.swiglu_backward(dinp, inp, dout, N, F)
    if N * F < 1000:
        assert_gradients(forward, dout, dinp=(dinp, inp))


@pytest.fixture
def folder(tmp_path):
    """make(**config.json) -> (a Hugging Face folder with a random Llama, the model in transformers)."""
    transformers = pytest.importorskip("transformers")
    import torch

    def make(**changes):
        torch.manual_seed(0)
        sizes = dict(vocab_size=131, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        model.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf", model
    return make


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 1e4}


@pytest.mark.parametrize("changes", ({"tie_word_embeddings": True}, {"rope_parameters": SCALED, "head_dim": 24},
                                     {"num_key_value_heads": 4}, {"num_key_value_heads": 1}), ids=str)
def test_transformers_computes_the_same(folder, tmp_path, changes):
    """Logits, loss and all gradients; a checkpoint and the folder made of it keep every bit."""
    import torch

    path, reference = folder(**changes)
    architecture, config, params = export_weights.read_hf_folder(str(path))
    x, y = np.random.default_rng(0).integers(0, config.V, (2, 3, 60))
    model = architecture(config, params)
    model.allocate_activations(3, 60)
    model.allocate_training(3, 60)
    loss = model.forward(x, y)
    logits = model.acts.logits.copy()
    model.backward()
    expected = reference(torch.from_numpy(x)).logits
    mean = torch.nn.functional.cross_entropy(expected.flatten(0, 1), torch.from_numpy(y).flatten())
    mean.backward()
    assert abs(loss - mean.item()) < 2e-6 and np.abs(logits - expected.detach().numpy()).max() < 1e-5
    gradients = dict(reference.named_parameters())
    for name, view, heads in export_weights.llama_hf.named_slices(config, model.grads):
        right = gradients[name].grad.numpy()
        got = export_weights.llama_hf.halves(view, heads)
        assert np.abs(got - right).max() < 1e-5 * np.abs(right).max(), name

    write_model(tmp_path / "model.bin", config, params)
    assert read_model(tmp_path / "model.bin", t.Llama3)[0] == config
    export_weights.write_hf_folder(str(tmp_path / "model.bin"), str(tmp_path / "again"))
    again = export_weights.read_hf_folder(str(tmp_path / "again"))
    assert again[1] == config and np.array_equal(again[2].buffer, params.buffer)
    assert type(reference).from_pretrained(tmp_path / "again")(torch.from_numpy(x)).logits.equal(expected)


@pytest.mark.parametrize("changes, words", (
    ({"model_type": "qwen2"}, "model_type is 'qwen2'"), ({"sliding_window": 16}, "sliding_window is 16"),
    ({"attention_bias": True}, "attention_bias"), ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
    ({"num_key_value_heads": 3}, "NKV=3"), ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ({"intermediate_size": 48}, "mlp.down_proj.weight has shape"),
))
def test_what_is_no_llama(folder, changes, words):
    path, _ = folder()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=words):
        export_weights.read_hf_folder(str(path))


def test_a_file_of_llm_c_s(tmp_path):
    """Without our fields: F is Meta's formula, the factor 8, the head untied."""
    header = t.Config(64, 131, 1, 4, 2, 48, 131, 160, 12, tied=0, theta=1e4).to_header(3)
    header[8], header[9], header[12:20] = 32, 1, 0
    header[256:257] = np.array([1.2], "<f4").view("<i4")
    config = t.Config.from_header(header)
    assert (config.F, config.HS, config.tied, config.factor, config.theta) == (160, 12, 0, 8, 1e4)  # 1.2 * 128 = 153
    assert t.Config.from_header(config.to_header(3)) == config


def test_a_vocabulary_of_hugging_face(folder, workplace, run_here, monkeypatch):
    """From the folder to tokens, through a run, to a folder: the same tokenizer encodes and decodes everywhere; a chat
    template asks as transformers does."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>", "<|user|>"],
                                             show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = "the cat sat on the mat, the dog on the log; größer 🙂 " * 60
    tokenizer.train_from_iterator([text], trainer)
    V = tokenizer.get_vocab_size()
    path, _ = folder(vocab_size=V, max_position_embeddings=64, eos_token_id=0)
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{{ eos_token }}{% endfor %}{{ '>' }}"
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}))
    (workplace / "cat.txt").write_text(text)

    run_program("export_weights.py", "--model", path, "--output_dir", ".")
    run_program("prepro_text.py", "cat.txt", "--vocabulary", path, "--output", "data/cat")
    ids = tokenizer.encode(text).ids
    data = [vocabulary.load_encoding(str(path)).eot_token, *ids]
    assert np.concatenate([open_tokens(f"data/cat_{split}.bin", V)[:] for split in ("train", "val")]).tolist() == data
    run_program("train_llama3.py", "-e", "llama3_hf.bin", "-i", "data/cat", "-o", "run", "-b", 2, "-t", 16, "-x", 2,
                "-s", 0)
    run_program("export_weights.py", "--to_hf", "run", "again")
    assert (workplace / "again" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    for model in (path, "run", "again"):
        done = run_here(generate, model, "--prompt", "größer 🙂", "--tokens", 5, "--json", "--device", "cpu")
        assert json.loads(done.stdout)["prompt_ids"] == tokenizer.encode("größer 🙂").ids
    done = run_here(generate, path, "--chat", "--prompt", "the cat", "--tokens", 5, "--json", "--device", "cpu")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path)
    asked = theirs.apply_chat_template([{"role": "user", "content": "the cat"}], add_generation_prompt=True)
    assert json.loads(done.stdout)["prompt_ids"] == list(asked["input_ids"])
    assert_one_line_error(run_here(generate, "run", "--chat", "--prompt", "a", check=False), "--chat", "template")


def test_a_run(workplace, run_here):
    """Trained from random weights, resumed with the same bits, evaluated, asked for a text."""
    flags = ("-e", "l2", "-b", 2, "-t", 16, "-s", 0, "-v", 4, "-n", 2)
    run_program("train_llama3.py", *flags, "-x", 4, "-o", "whole")
    run_program("train_llama3.py", *flags, "-x", 4, "-o", "parts", "--print_every", 2)
    for name in ("model_00000004.bin", "state_00000004_00000.bin", "DONE_00000004"):
        (workplace / "parts" / name).unlink()
    done = run_program("train_llama3.py", *flags, "-x", 4, "-o", "parts", "-y", 1)
    assert "resuming at step 2" in done.stdout and "Llama" not in done.stderr
    name = "model_00000004.bin"
    assert (workplace / "whole" / name).read_bytes() == (workplace / "parts" / name).read_bytes()
    assert run_here(generate, "whole", "--prompt", "a", "--tokens", 20, "--ignore_eot", "--device", "cpu").stdout
    wrong = run_program("train_gpt2.py", "-e", f"whole/{name}", check=False)
    assert_one_line_error(wrong, name, "Llama 3 checkpoint", "model checkpoint")
