"""Vocabularies of Hugging Face folders, used as themselves: ids, text and where a text ends are
those of the packages `tokenizers` and `transformers`, of whatever kind a tokenizer is; from such a
folder to a run and to a folder again."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

import evaluate
import export_weights
import generate
import prepro_text
import train_gpt2
from conftest import SMALL, random_params
from llmc.api import load
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import TokenFile, open_tokens
from llmc.errors import UserError
from llmc.vocabulary import Folder, load_vocabulary, open_vocabulary, save_vocabulary
from prepro import reading
from prepro.hellaswag import make_example
from train_gpt2 import GPT2

tokenizers = pytest.importorskip("tokenizers")
N = tokenizers.normalizers
P = tokenizers.pre_tokenizers
D = tokenizers.decoders
TEXT = "the ferry leaves at noon; forty boats, größer 🙂\n" * 40
SPECIAL = ["<|bos|>", "<|eos|>", "[UNK]"]

# --------------------------------------------------------------------------------------------------
# kinds of tokenizers


def byte_level(size=290, special=("<|bos|>", "<|eos|>")):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    letters = P.ByteLevel
    made.pre_tokenizer = letters(add_prefix_space=False)
    made.decoder = D.ByteLevel()
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=letters.alphabet(),
        show_progress=False))
    return made


def sentence_piece():
    """As Llama 2's: a space is part of the word after it, and one is put before the text."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = P.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    words.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False))
    made = json.loads(words.to_str())
    made["model"]["byte_fallback"] = True
    made["pre_tokenizer"] = None
    made["added_tokens"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(made))
    made.normalizer = N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")])
    made.decoder = D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])
    made.add_special_tokens(special)
    return made


def full_width():
    """A byte-level vocabulary that reads full-width letters as ASCII."""
    made = byte_level()
    made.normalizer = N.NFKC()
    return made


def of_words():
    """Whole words, joined by spaces: there is no decoder."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = P.Whitespace()
    made.train_from_iterator([TEXT],
                             tokenizers.trainers.WordLevelTrainer(special_tokens=SPECIAL,
                                                                  show_progress=False))
    return made


def word_piece():
    """As BERT's: ## joins a piece to the word before it."""
    letters = sorted({*TEXT} - {*" \n"})
    words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "fe", "##rr", "##y", "the",
             "no", "##on"]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)},
                                                            unk_token="[UNK]"))
    made.normalizer = N.BertNormalizer()
    made.pre_tokenizer = P.BertPreTokenizer()
    made.decoder = D.WordPiece()
    made.add_special_tokens(SPECIAL)
    return made


def with_suffix():
    """As GPT-1's: </w> ends a word."""
    letters = sorted({*TEXT} - {*" \n"})
    words = [*SPECIAL, *letters, *(f"{letter}</w>" for letter in letters), "no", "on</w>"]
    merges = [("n", "o"), ("o", "n</w>")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, merges, unk_token="[UNK]",
        end_of_word_suffix="</w>"))
    made.pre_tokenizer = P.Whitespace()
    made.decoder = D.BPEDecoder()
    made.add_special_tokens(SPECIAL)
    return made


def unigram():
    """As T5's: pieces with probabilities, of which [UNK] stands for what they lack."""
    letters = sorted({*TEXT.replace("ß", "")} - {*" \n"} | {"▁"})
    pieces = [*((token, 0.0) for token in SPECIAL), *((letter, -6.0) for letter in letters),
              ("▁noon", -4.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer = P.Metaspace()
    made.decoder = D.Metaspace()
    made.add_special_tokens(SPECIAL)
    return made


KINDS = byte_level, sentence_piece, full_width, of_words, word_piece, with_suffix, unigram


@pytest.fixture
def folder(here):
    """folder(tokenizer, {file: object}, rows) writes the folder `hf`, also as model.bin of so many
    rows."""
    def write(tokenizer, files=None, rows=0):
        (here / "hf").mkdir(exist_ok=True)
        if tokenizer:
            tokenizer.save("hf/tokenizer.json")
        for name, found in (files or {"tokenizer_config.json": {"eos_token": "<|eos|>"}}).items():
            (here / "hf" / name).write_text(found if isinstance(found, str) else json.dumps(found))
        if rows:
            config = dataclasses.replace(SMALL, V=rows, Vp=rows)
            write_model("model.bin", config, random_params(config))
            save_vocabulary("tokenizer.bin", open_vocabulary("hf"))
        return "hf"

    return write


@pytest.mark.parametrize("make", KINDS)
def test_text_is_that_of_the_tokenizer(folder, make):
    """Whole, token by token, and after other text; a number that is no id is an error."""
    made = make()
    found = open_vocabulary(folder(made, {"config.json": {"eos_token_id": 1}}))
    rng = np.random.default_rng(0)
    texts = [made.encode(TEXT[:200]).ids, *rng.integers(0, len(found.tokens), (20, 30)).tolist()]
    for ids in texts:
        whole = made.decode(ids, skip_special_tokens=False)
        assert found.decode(ids) == whole
        stream = found.stream()
        streamed = "".join(map(stream.add, ids)) + stream.end()
        # bytes that are no letter may be so many characters or others
        assert streamed == whole or "\ufffd" in whole
        if "\ufffd" not in whole:
            assert found.decode(ids[:9]) + found.decode(ids[9:], after=ids[:9]) == whole
    for id in (-1, len(found.tokens), 2**40):
        pytest.raises(UserError, found.decode, [id]).match(f"token id {id}: expected 0 to")


@pytest.mark.parametrize("make", KINDS)
def test_bytes_are_those_of_the_text(folder, run_here, make):
    """Whatever a tokenizer adds, drops or replaces; also where a document is cut, and in shards."""
    config = dataclasses.replace(SMALL, V=500, Vp=512)
    write_model("model.bin", config, random_params(config))
    folder(make(), {"config.json": {"eos_token_id": 1}})
    texts = ["the ferry; Ｎｏｏｎ", "größer  ☃ boats", " at\tnoon 🙂\n", "ﬁve"]
    for name, documents, most in (("many", texts * 30, 10**6), ("one", ["".join(texts) * 30], 900)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        Path(f"{name}.jsonl").write_text(lines)
        done = run_here(prepro_text, f"{name}.jsonl", "--vocabulary", "hf", "--output", name,
                        "--val_fraction", 0.5, "--shard_tokens", most)
        paths = sorted(map(str, Path().glob(f"{name}_*_0*.bin")))
        found = sum(TokenFile(path, 500).text_bytes for path in paths)
        count = sum(len(text.encode()) for text in documents)
        if name == "many":
            assert found == count
        else:  # a file that begins within a document leaves out its first token
            assert count - 12 * (len(paths) - 1) < found < count
        assert ((" are lost" in done.stderr)
                == (make in (of_words, word_piece, with_suffix, unigram)))
    result = json.loads(run_here(evaluate, "model.bin", "--data", "many_val_000000.bin",
                                 "--tokenizer", "many_tokenizer.bin", "--json").stdout)
    assert result["bytes"] == TokenFile("many_val_000000.bin", 500).text_bytes
    part = run_here(evaluate, "model.bin", "--data", "many_val_000000.bin", "--tokenizer",
                    "many_tokenizer.bin", "--tokens", 50, "--json")
    assert ("no bits per byte" in part.stderr) == (make is not byte_level)
    assert (json.loads(part.stdout)["bits_per_byte"] is None) == (make is not byte_level)


def test_truncation_and_padding_are_off(folder):
    made = byte_level()
    expected = made.encode(TEXT).ids
    made.enable_truncation(max_length=12)
    made.enable_padding(length=64, pad_id=0, pad_token="<|bos|>")
    found = open_vocabulary(folder(made))
    assert (found.encode(TEXT) == expected and found.encode("") == []
            and (found.eot, found.starts) == (1, []))


def test_what_is_put_after_a_text_is_no_part_of_a_prompt(folder):
    """As BERT's template does; it still ends a text."""
    made = word_piece()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)])
    found = open_vocabulary(folder(made, {"config.json": {"eos_token_id": 50256}}))
    assert (found.encode("noon") == made.encode("noon").ids[:-1]
            and (found.eot, found.stops) == (0, {0, 1}))


@pytest.mark.parametrize("files, special, expected", (
    ({"config.json": {"eos_token_id": 5},
      "tokenizer_config.json": {"eos_token": {"content": "<|eos|>"}}}, SPECIAL, 1),
    ({"config.json": {"eos_token_id": 5}, "special_tokens_map.json": {"eos_token": "<|eos|>"}},
     SPECIAL, 1),
    ({"generation_config.json": {"eos_token_id": 5}, "config.json": {"eos_token_id": 0}}, SPECIAL,
     0),
    ({"config.json": {"eos_token_id": 5}}, ["<pad>", "</s>"], 1),
    ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": 5}}, SPECIAL,
     None),
    ({"generation_config.json": {"eos_token_id": [2, 1]},
      "tokenizer_config.json": {"eos_token": "<|bos|>"}}, SPECIAL,
     0)))
def test_which_token_ends_a_text(folder, files, special, expected):
    """Token 5 is a word of the text: what config.json says then is GPT2Config's default, whatever
    its number."""
    path = folder(byte_level(special=special), files)
    if expected is None:
        pytest.raises(UserError, open_vocabulary, path).match("which token ends a text")
    else:
        found = open_vocabulary(path)
        assert found.eot == expected and 5 not in found.stops


def test_words_and_merges(folder, run_here):
    """What older tools write, and --to_hf of a GPT-2: read; a run has its tokenizer.json. Of
    another kind, a line."""
    made = byte_level(special=("<|endoftext|>", "<|end|>"))
    folder(None,
           {"tokenizer_config.json": {"eos_token": "<|endoftext|>",
                                      "pad_token": {"content": "<|end|>"}},
            "added_tokens.json": {"<|new|>": 291, "<|now|>": 290}})
    made.model.save("hf")
    text = TEXT + "<|end|><|endoftext|>x<|now|><|new|>"
    found = open_vocabulary("hf")
    assert (found.encode(text) == [*made.encode(TEXT).ids, 1, 0, *made.encode("x").ids, 290, 291]
            and found.eot == 0)
    assert load_vocabulary("hf", 292).encode(text) == found.encode(text)
    Path("x.txt").write_text(TEXT)
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x")
    again = load_vocabulary("model.bin", 292, "x_tokenizer.bin")
    assert (again.encode(text), again.eot) == (found.encode(text), 0)

    vocabulary = json.loads(Path("hf/vocab.json").read_text())
    Path("hf/vocab.json").write_text(json.dumps(vocabulary | {"x</w>": 292}))
    pytest.raises(UserError, open_vocabulary, "hf").match("vocab.json: .*</w>.*save_pretrained")
    for name in ("vocab.json", "merges.txt"):
        os.unlink(f"hf/{name}")
    Path("hf/tokenizer.model").touch()
    pytest.raises(UserError, open_vocabulary,
                  "hf").match("tokenizer.json: no such file; make it of tokenizer.model")


def test_more_tokens_than_rows(folder, run_here):
    """One that was added for padding, which no text has. An id without a row is an error where it
    occurs."""
    made = byte_level()
    made.add_special_tokens(["<pad>"])
    folder(made, rows=290)
    ids = json.loads(run_here(generate, "model.bin", "--prompt", "noon", "--tokens", 5,
                              "--json").stdout)["prompt_ids"]
    assert ids == made.encode("noon").ids and load("model.bin").loss("at noon") > 0
    run_here(generate, "model.bin", "--prompt", "a<pad>",
             fails=("290, expected ids from 0 to 289",))
    Path("x.txt").write_text(TEXT)
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x")
    done = run_here(train_gpt2, "-e", "model.bin", "-i", "x", "-x", 2, "-t", 16, "-s", 2, "-o",
                    "run")
    assert "note: x_tokenizer.bin: 291 tokens, for a model of 290 rows" in done.stderr
    assert math.isfinite(json.loads(run_here(evaluate, "run", "--json").stdout)["bits_per_byte"])
    run_here(export_weights, "--to_hf", "run", "again")
    assert json.loads(Path("again/config.json").read_text())["vocab_size"] == 290
    run_here(export_weights, "--model", "run", "--output_dir", "files", "--debug_state", 0)
    assert read_model("files/gpt2_run.bin", GPT2)[0].V == 290


def test_ids_need_no_vocabulary(folder, run_here):
    folder(byte_level(), rows=290)
    Path("tokenizer.json").write_text("{}")
    run_here(generate, "model.bin", "--prompt", "a", fails=("tokenizer.json: cannot be read",))
    done = run_here(generate, "model.bin", "--prompt_ids", 5, 6, "--tokens", 3)
    assert (done.stdout.startswith("5 6 ")
            and "warning: tokenizer.json: cannot be read" in done.stderr)


def test_an_ending_is_encoded_with_its_context(folder):
    """SentencePiece would put another space before it; GPT-2's own tokens are llm.c's."""
    made = sentence_piece()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A",
                                                                   special_tokens=[("<s>", 1)])
    found = open_vocabulary(folder(made, {"config.json": {"eos_token_id": 2}}))
    for context in ("the ferry", "the ferry  "):
        example = make_example(context, ["leaves at noon", "forty boats"], 0, found)
        for ending, ids in zip(("leaves at noon", "forty boats"), example.endings):
            assert [*example.context, *ids] == made.encode(f"{context} {ending}").ids
        assert example.context.tolist() == made.encode("the ferry").ids


@pytest.mark.parametrize("name, text, words", (
    ("tokenizer_config.json", "[" * 9999, "is not a JSON object"),
    ("config.json", "[1]", "is not a JSON object"),
    ("generation_config.json", '{"a": ' * 9999, "is not a JSON object"),
    ("config.json", "{}", "which token ends"),
    ("config.json", '{"eos_token_id": [[1]]}', "expected a token's id"),
    ("tokenizer.json", "{", "cannot be read"),
    ("tokenizer.json", 10**9, "ids up to 1000000000, expected .* less than 2\\^22")))
def test_files_that_are_refused(folder, name, text, words):
    """Or a word with an id of 10^9, which no list could hold."""
    path = folder(byte_level(), {"config.json": "{}"})
    if isinstance(text, int):
        made = json.loads(Path("hf/tokenizer.json").read_text())
        made["model"]["vocab"] |= {"far": text}
        text = json.dumps(made)
    Path(path, name).write_text(text)
    pytest.raises(UserError, open_vocabulary, path).match(words)


def test_a_chinese_gpt2(folder, run_here):
    """From a folder to a fine-tuned model, to text, to a folder: ids, text and losses are those of
    transformers. It has BERT's pieces, GPT2Config's 50256, which is no token, and one token more
    than rows."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    text = "渡轮中午离开，海鸥跟着它。我们数船，有四十艘。\n"
    letters = sorted({*text} - {"\n"})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)},
                                                            unk_token="[UNK]"))
    made.normalizer = N.BertNormalizer()
    made.pre_tokenizer = P.BertPreTokenizer()
    made.decoder = D.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<pad>"])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "sep_token": "[SEP]",
                "pad_token": "<pad>"}
    folder(made, {"tokenizer_config.json": settings})
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(words), n_positions=32, n_embd=64, n_layer=2,
                                     n_head=2, initializer_range=0.2)
    transformers.GPT2LMHeadModel(config).save_pretrained("hf")

    def compare(name):
        model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
        theirs = transformers.AutoTokenizer.from_pretrained(name)
        ids = theirs.encode("海鸥数船", add_special_tokens=False)
        answer = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False,
                                eos_token_id=3)[0].tolist()
        flags = "--prompt", "海鸥数船", "--temperature", 0, "--tokens", 9
        ours = json.loads(run_here(generate, name, *flags, "--json").stdout)
        assert (ours["prompt_ids"], ours["prompt_ids"] + ours["ids"]) == (ids, answer)
        shown = run_here(generate, name, *flags).stdout
        assert shown == theirs.decode([id for id in answer if id != 3]) + "\n"
        loss = model(torch.tensor([answer]), labels=torch.tensor([answer])).loss.item()
        assert load(name).loss(answer) == pytest.approx(loss, rel=1e-5)

    compare("hf")
    run_here(export_weights, "--model", "hf", "--debug_state", 0)
    Path("x.txt").write_text(text * 30)
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x")
    ids = np.concatenate([open_tokens(f"x_{split}.bin", 500)
                          for split in ("train", "val")]).tolist()
    assert ids == [3, *made.encode(text * 30).ids]
    run_here(train_gpt2, "-e", "gpt2_hf.bin", "-i", "x", "-x", 3, "-b", 2, "-t", 16, "-l", 1e-3,
             "-o", "run")
    run_here(export_weights, "--to_hf", "run", "again")
    assert read_model("run/model_00000003.bin", GPT2)[0].V == len(words)
    compare("again")


# --------------------------------------------------------------------------------------------------
# added tokens, long texts, padded models


def test_added_tokens_stand_for_themselves(folder, run_here):
    """One that is longer than a tokenizer file holds is refused before a file is written."""
    made = byte_level()
    text = "a    b naïve café <tool>"
    made.add_tokens([tokenizers.AddedToken(word, normalized=False)
                     for word in ("    ", "naïve café", "<tool>")])
    found = open_vocabulary(folder(made))
    assert found.encode(text) == made.encode(text).ids and found.decode(found.encode(text)) == text
    assert found.eot == 1 and found.tokens[-3:] == [b"    ", "naïve café".encode(), b"<tool>"]
    made.add_tokens(["=" * 300])
    Path("x.txt").write_text(TEXT)
    run_here(prepro_text, "x.txt", "--vocabulary", folder(made), "--output", "x",
             fails=("token 293 has 300 bytes",))
    save_vocabulary("hf/tokenizer.bin", open_vocabulary("bytes"))  # the other's files go
    assert sorted(os.listdir()) == ["hf", "x.txt"] and os.listdir("hf") == ["tokenizer.bin"]


@pytest.mark.parametrize("make", (byte_level, sentence_piece))
def test_a_long_text_has_the_ids_of_the_whole(folder, run_here, monkeypatch, make):
    """A document of it, too, which prepro_text.py does not cut."""
    made = make()
    text = (TEXT * 20).replace("noon", "noon" * 50) + "x" * 30 + 9 * "🙂"
    monkeypatch.setattr(Folder, "WINDOW", 500)
    monkeypatch.setattr(Folder, "MARGIN", 80)
    found = open_vocabulary(folder(made, {"config.json": {"eos_token_id": [1, 2, 99999]}}))
    assert found.encode(text, begin=False) == made.encode(text).ids and found.stops == {1, 2}
    assert found.decode(found.encode(text)) == made.decode(made.encode(text).ids) == text
    same = "y" * 3000  # windows that agree nowhere
    assert found.encode(same, begin=False) == made.encode(same).ids
    Path("x.txt").write_text(text)
    monkeypatch.setattr(reading, "PIECE", 1000)
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x", "--processes", 1)
    ids = np.concatenate([open_tokens(f"x_{split}.bin", 500)
                          for split in ("train", "val")]).tolist()
    assert ids == [1, *made.encode(text).ids]


def test_a_padded_model(folder, run_here):
    """Rows without a token are padding: they are never drawn, and training leaves them 0."""
    folder(byte_level(), rows=384)
    for text in (run_here(generate, "model.bin", "--prompt", "the", "--tokens", 300).stdout,
                 load("model.bin").generate("the", tokens=300)):
        assert text.startswith("the") and len(text) > 300
    Path("x.txt").write_text(TEXT)
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x")
    run_here(train_gpt2, "-e", "model.bin", "-i", "x", "-x", 2, "-t", 16, "-o", "run", "-c", 0.1)
    config, params = read_model("run/model_00000002.bin", GPT2)
    assert ((config.V, config.Vp) == (290, 384) and not params.wte[290:].any()
            and params.wte[289].any())
    run_here(export_weights, "--to_hf", "model.bin", "again")
    assert json.loads(Path("again/config.json").read_text())["vocab_size"] == 290
    folder(byte_level(), rows=302)  # any number
    assert load("model.bin").config.V == 290
