"""Llama 3: its layers against finite differences, the model against transformers, files, folders,
text."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch

import export_weights
import generate
import prepro_text
import test_gpt2
import train_llama3 as t
from conftest import SMALL_LLAMA as CONFIG, make_model, trainer_of
from llmc import vocabulary
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import open_tokens
from llmc.debugstate import check_tensor
from llmc.errors import UserError
from test_gpt2 import SMOOTH
from backends import NumpyRun
from test_layers import SEVERAL_BLOCKS, SHAPES, assert_gradients, forward_of, nan, normal
from test_verdict import case, first_wrong, given, instead, is_right, scaled

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 1e4}


@pytest.mark.parametrize("B, T, C, NH", (*SHAPES, SEVERAL_BLOCKS))
def test_rmsnorm(B, T, C, NH):
    inp = normal(B, T, C)
    weight = normal(C, seed=1)
    dout = normal(B, T, C, seed=3)
    rstd = nan(B, T)
    forward = forward_of(t.rmsnorm_forward, nan(B, T, C), rstd, inp, weight, 1e-5, B, T, C)
    expected = inp / np.sqrt(np.square(inp).mean(-1, keepdims=True) + 1e-5) * weight
    assert check_tensor("out", forward(), expected, 1e-6)
    start = normal(B, T, C, seed=4)
    dinp = start.copy()
    dweight = nan(C)
    t.rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B, T, C)
    assert_gradients(forward, dout, dinp=(dinp - start, inp), dweight=(dweight, weight))


@pytest.mark.parametrize("factor", (0, 8))
def test_rope(factor):
    """Of pairs as complex numbers; what is beyond the queries and keys stays."""
    B, T, heads, HS, K = 2, 9, 3, 8, 4
    config = t.Config(maxT=T, V=9, L=1, NH=1, NKV=1, C=8, Vp=128, F=8, HS=HS, theta=100.0,
                      factor=factor, original=16)
    table = t.rope_table(config, T)
    x = normal(B, T, heads * HS + K)
    frequency = 100.0 ** (-np.arange(0, HS, 2) / HS)
    if factor:
        kept = np.clip((16 * frequency / (2 * np.pi) - 1) / 3, 0, 1)
        frequency = (1 - kept) * frequency / factor + kept * frequency
    angles = np.arange(T)[:, None] * frequency
    pairs = x[..., : heads * HS].reshape(B, T, heads, HS // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate((np.stack((turned.real, turned.imag), -1).reshape(B, T, -1),
                               x[..., heads * HS :]), -1)
    got = x.copy()
    t.rope_forward(got, *table, B, T, heads, HS)
    assert check_tensor("out", got, expected, 1e-5)
    t.rope_backward(got, *table, B, T, heads, HS)
    assert check_tensor("back", got, x, 1e-5), "a rotation's gradient is the rotation back"


@pytest.mark.parametrize("B, T, NH, NKV, HS", ((1, 1, 1, 1, 2), (2, 5, 4, 2, 4), (1, 17, 6, 1, 2)))
def test_attention_of_groups(B, T, NH, NKV, HS):
    """As with each group's keys and values repeated."""
    inp = normal(B, T, (NH + 2 * NKV) * HS)
    dout = normal(B, T, NH * HS, seed=3)
    out = nan(B, T, NH * HS)
    att = nan(B, NH, T, T)
    datt = nan(B, NH, T, T)
    dinp = np.full_like(inp, np.nan)
    forward = forward_of(t.attention_forward, out, att, inp, B, T, NH, NKV, HS)
    forward()
    heads = inp.reshape(B, T, -1, HS).swapaxes(1, 2)
    query, key, value = heads[:, :NH], *(np.repeat(x, NH // NKV, 1)
                                         for x in (heads[:, NH:-NKV], heads[:, -NKV:]))
    scores = np.where(np.tri(T, dtype=bool), query @ key.swapaxes(2, 3) / np.sqrt(HS), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert check_tensor("out", out, (weights @ value).swapaxes(1, 2).reshape(out.shape), 1e-6)
    t.attention_backward(dinp, datt, dout, inp, att, B, T, NH, NKV, HS)
    assert_gradients(forward, dout, dinp=(dinp, inp))


@pytest.mark.parametrize("N, F", ((1, 3), (7, 5)))
def test_swiglu(in_blocks, N, F):
    inp = normal(N, 2 * F)
    dout = normal(N, F, seed=3)
    dinp = nan(N, 2 * F)
    forward = forward_of(t.swiglu_forward, nan(N, F), inp, N, F)
    up = inp[:, :F]
    gate = inp[:, F:]
    assert check_tensor("out", forward(), up * gate / (1 + np.exp(-gate)), 1e-6)
    t.swiglu_backward(dinp, inp, dout, N, F)
    assert_gradients(forward, dout, dinp=(dinp, inp))


# --------------------------------------------------------------------------------------------------
# the verdict of test_gpt2.py: right models pass, planted faults do not, and the first wrong row
# says where


UNTIED = dataclasses.replace(CONFIG, V=61, Vp=128, L=3, tied=0, theta=1e3, factor=8, original=16)


@pytest.mark.parametrize("tied", (0, 1))
def test_the_ladder(tied):
    assert is_right(dataclasses.replace(UNTIED, tied=tied))


QUERIES, KEYS, VALUES = np.split(np.arange((CONFIG.NH + 2 * CONFIG.NKV) * CONFIG.HS),
                                 (CONFIG.Q, CONFIG.Q + CONFIG.K))
FAULTS = {  # what is wrong: (function, right one -> wrong one, the first wrong row)
    "rmsnorm's eps 1e-6": ("rmsnorm_forward", given(eps=lambda eps: 1e-6), "logits"),
    "rmsnorm's last weight forgotten": (
        "rmsnorm_forward", instead("out *= weight", "out[..., :-1] *= weight[:-1]"), "logits"),
    "rmsnorm backward without the mean": ("rmsnorm_backward", instead("dn -= n", ""), "dfcprojw"),
    "rmsnorm backward's rstd off by 1e-4": (
        "rmsnorm_backward", given(rstd=lambda rstd: rstd * np.float32(1.0001)), "dlnfw"),
    "rmsnorm's dweight off by 1e-5": ("rmsnorm_backward", scaled("dweight", 1.00001), "dlnfw"),
    "RoPE's factor 32 for 8": ("rope_table", instead("float32(config.factor)", "float32(32)"),
                               "logits"),
    "RoPE's theta 1 percent off": ("rope_table", instead("config.theta", "1010.0"), "logits"),
    "RoPE's original length": ("rope_table", instead("config.original", "17"), "logits"),
    "RoPE a position on": ("rope_table",
                           lambda right: lambda config, T, *at: right(config, T, 1), None),
    "RoPE of halves": ("rope_forward", instead("HS // 2, 2)", "2, HS // 2).swapaxes(3, 4)"),
                       "logits"),
    "RoPE not turned back": ("rope_backward", lambda right: t.rope_forward, "dqkvw"),
    "a head of the wrong group": ("split_heads", instead("heads[:, :NH]", "heads[:, [1, 2, 0, 3]]"),
                                  "logits"),
    "dkey of a group's last head lost": ("attention_backward",
                                         scaled("dinp", 0.5, at=np.s_[..., KEYS]), "dqkvw"),
    "dvalue off by 1e-4": ("attention_backward", scaled("dinp", 1.0001, at=np.s_[..., VALUES]),
                           "dqkvw"),
    "dquery off by 1e-4": ("attention_backward", scaled("dinp", 1.0001, at=np.s_[..., QUERIES]),
                           "dqkvw"),
    "swiglu off by 1e-5": ("swiglu_forward", scaled("out", 1.00001), "logits"),
    "dgate without its second term": ("swiglu_backward", instead("dgate += s", "dgate[...] = s"),
                                      "dfcw"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red(fault, monkeypatch, capsys):
    """But for one that is none: attention sees only how far two positions are apart."""
    name, plant, row = FAULTS[fault]
    drawn, yardstick = case(UNTIED)
    monkeypatch.setattr(t, name, plant(getattr(t, name)))
    assert first_wrong(capsys, yardstick, NumpyRun(*drawn, SMOOTH)) == row


@pytest.fixture
def folder(tmp_path):
    """make(**config.json) -> (a Hugging Face folder with a random Llama, the model in
    transformers)."""
    transformers = pytest.importorskip("transformers")

    def make(**changes):
        torch.manual_seed(0)
        sizes = dict(vocab_size=131, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
                     num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
                     initializer_range=0.1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        model.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf", model
    return make


@pytest.mark.parametrize("changes",
                         ({"tie_word_embeddings": True},
                          {"rope_parameters": SCALED, "head_dim": 24},
                          {"num_key_value_heads": 4}, {"num_key_value_heads": 1}), ids=str)
def test_transformers_computes_the_same(folder, tmp_path, changes):
    """Logits, loss and all gradients; a checkpoint and the folder made of it keep every bit."""
    path, reference = folder(**changes)
    _, config, params = export_weights.read_hf_folder(str(path))
    x, y = np.random.default_rng(0).integers(0, config.V, (2, 3, 60))
    model = make_model(3, 60, 1, config, params)
    loss = model.forward(x, y)
    logits = model.acts.logits.copy()
    model.backward()
    expected = reference(torch.from_numpy(x)).logits
    mean = torch.nn.functional.cross_entropy(expected.flatten(0, 1), torch.from_numpy(y).flatten())
    mean.backward()
    assert (abs(loss - mean.item()) < 2e-6
            and np.abs(logits - expected.detach().numpy()).max() < 1e-5)
    for name, view, order in export_weights.llama_slices(config, model.grads):
        right = reference.get_parameter(name).grad.numpy()
        got = export_weights.to_theirs(view, order)
        assert np.abs(got - right).max() < 1e-5 * np.abs(right).max(), name
    write_model(tmp_path / "model.bin", config, params)
    assert read_model(tmp_path / "model.bin", t.Llama3)[0] == config
    export_weights.write_hf_folder(str(tmp_path / "model.bin"), str(tmp_path / "again"))
    again = export_weights.read_hf_folder(str(tmp_path / "again"))
    assert again[1] == config and np.array_equal(again[2].buffer, params.buffer)
    assert type(reference).from_pretrained(tmp_path
                                           / "again")(torch.from_numpy(x)).logits.equal(expected)


@pytest.mark.parametrize("changes, words", (
    ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
    ({"sliding_window": 16}, "sliding_window is 16"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
    ({"logits_scaling": 8}, "logits_scaling is 8"),
    ({"layer_types": ["chunked"]}, "layer_types has 'chunked'"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of whole heads"),
    # beside rope_parameters
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
    ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window is 4096"),
    ({"num_key_value_heads": 3}, "NKV=3"),
    ({"intermediate_size": 48}, "mlp.up_proj.weight has shape"),
    ({"sliding_window": 4096, "use_cache": True, "rope_interleaved": False, "pad_token_id": 3,
      "tie_word_embeddings": True}, None)))
def test_what_is_no_llama_and_what_changes_nothing(folder, changes, words):
    """A window as wide as the model, fields without a meaning; the head in the file, although a
    flag ties it."""
    path, _ = folder()
    right = export_weights.read_hf_folder(str(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        found = export_weights.read_hf_folder(str(path))
        assert found[1] == right[1] and np.array_equal(found[2].buffer, right[2].buffer)


def test_a_file_of_llm_c_s(tmp_path):
    """Without our fields: F is Meta's formula, the factor 8, the head untied."""
    header = t.Config(64, 131, 1, 4, 2, 48, 131, 160, 12, tied=0, theta=1e4).to_header(3)
    header[8] = 32
    header[9] = 1
    header[12:20] = 0
    header[256:257] = np.array([1.2], "<f4").view("<i4")
    config = t.Config.from_header(header)
    # 1.2 * 128 = 153
    assert (config.F, config.HS, config.tied, config.factor, config.theta) == (160, 12, 0, 8, 1e4)
    assert t.Config.from_header(config.to_header(3)) == config
    # llm.c, which knows Meta's formula alone, finds it, too
    for F in (1, 2, 40, 63, 100, 127, 128, 129, 4096):
        header = dataclasses.replace(config, F=F).to_header(3)
        header[19] = 0
        assert t.Config.from_header(header).F == F


def test_a_vocabulary_of_hugging_face(folder, workplace, run_here, monkeypatch):
    """From the folder to tokens, through a run, to a folder; a chat template asks as transformers
    does."""
    pytest.importorskip("jinja2")
    from test_vocabulary import TEXT, byte_level  # which want the package tokenizers
    tokenizer = byte_level(300, ["<|end|>", "<|user|>"])
    V = tokenizer.get_vocab_size()
    path, _ = folder(vocab_size=V, eos_token_id=0)
    tokenizer.save(str(path / "tokenizer.json"))
    template = ("{% for m in messages %}<|user|>{{ m['content'] }}{{ eos_token }}{% endfor %}{{"
                " '>' }}")
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
        "chat_template": template}))
    (workplace / "cat.txt").write_text(TEXT)

    def prompt_ids(model, *prompt):
        return json.loads(run_here(generate, model, *prompt, "--json", "--device",
                                   "cpu").stdout)["prompt_ids"]

    run_here(export_weights, "--model", path, "--output_dir", ".")
    run_here(prepro_text, "cat.txt", "--vocabulary", path, "--output", "data/cat")
    data = [vocabulary.open_vocabulary(str(path)).eot, *tokenizer.encode(TEXT).ids]
    assert np.concatenate([open_tokens(f"data/cat_{split}.bin", V)[:]
                           for split in ("train", "val")]).tolist() == data
    run_here(trainer_of(t.Llama3), "-e", "llama3_hf.bin", "-i", "data/cat", "-o", "run", "-b", 2,
             "-t", 16, "-x", 2)
    run_here(export_weights, "--to_hf", "run", "again")
    assert ((workplace / "again" / "tokenizer.json").read_bytes()
            == (path / "tokenizer.json").read_bytes())
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path)
    asked = theirs.apply_chat_template([{"role": "user", "content": "the cat"}],
                                       add_generation_prompt=True)
    for model in (path, "run", "again"):  # what a chat needs goes along
        assert prompt_ids(model, "--prompt", "größer 🙂") == tokenizer.encode("größer 🙂").ids
        assert prompt_ids(model, "--chat", "--prompt", "the cat") == list(asked["input_ids"])
        assert vocabulary.load_vocabulary(model, V).stops == {0}
    assert json.loads((workplace / "again" / "config.json").read_text())["eos_token_id"] == 0


def test_a_debug_state(workplace, run_here):
    run_here(export_weights, "--model", "l2", "--vocabulary", "bytes", "--input",
             "data/tiny_shakespeare_val.bin",
             "--batch_size", 2, "--sequence_length", 16, "--num_iterations", 3)
    done = run_here(test_gpt2, "--model", "llama3_l2.bin")
    assert done.stdout.endswith("overall okay: 1\n") and "step 3 " in done.stdout
    assert run_here(test_gpt2, "--model", "llama3_l2_bf16.bin").stdout.endswith("overall okay: 1\n")
    # now as llm.c writes it: [4] losses and norms, no trailer
    path = workplace / "llama3_l2_debug_state.bin"
    data = bytearray(path.read_bytes()[: -(40 + 4 * 3)])
    losses, norms = np.frombuffer(data[-24:], "<f4").reshape(2, 3)
    assert (data[16:20] == b"\3\0\0\0" and losses[0] > losses[2] > losses[0] - 0.1
            and (norms > 0.1).all())
    data[32:44] = bytes(12)
    path.write_bytes(data)
    assert run_here(test_gpt2, "--model", "llama3_l2.bin").stdout.endswith("overall okay: 1\n")
