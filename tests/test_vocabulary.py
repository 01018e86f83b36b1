"""The vocabularies of Hugging Face folders: ids and text are those of the package `tokenizers`, also for long texts."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

import export_weights
import generate
import prepro_text
import train_gpt2
from conftest import SMALL, random_params
from llmc.api import load
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import open_tokens
from llmc.errors import UserError
from llmc.vocabulary import Folder, load_vocabulary, open_vocabulary, save_vocabulary
from train_gpt2 import GPT2

tokenizers = pytest.importorskip("tokenizers")
TEXT = "the ferry leaves at noon; forty boats, größer 🙂\n" * 40


def byte_level(size=290, special=("<|bos|>", "<|eos|>")):
    made, letters = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer, made.decoder = letters(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=letters.alphabet(), show_progress=False))
    return made


def sentence_piece():
    """As Llama 2's: a space is part of the word after it, and one is put before the text."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    words.pre_tokenizer, special = tokenizers.pre_tokenizers.Metaspace(), ["<unk>", "<s>", "</s>"]
    words.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False))
    made, N, D = json.loads(words.to_str()), tokenizers.normalizers, tokenizers.decoders
    made["model"]["byte_fallback"], made["pre_tokenizer"], made["added_tokens"] = True, None, []
    made = tokenizers.Tokenizer.from_str(json.dumps(made))
    made.normalizer = N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")])
    made.decoder = D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])
    made.add_special_tokens(special)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """folder(tokenizer, {file: object}, rows) writes the folder `hf`, also as model.bin of so many rows."""
    def write(tokenizer, files=None, rows=0):
        (tmp_path / "hf").mkdir(exist_ok=True)
        tokenizer.save("hf/tokenizer.json")
        for name, found in (files or {"tokenizer_config.json": {"eos_token": "<|eos|>"}}).items():
            (tmp_path / "hf" / name).write_text(found if isinstance(found, str) else json.dumps(found))
        if rows:
            config = dataclasses.replace(SMALL, V=rows, Vp=rows)
            write_model("model.bin", config, random_params(config))
            save_vocabulary("tokenizer.bin", open_vocabulary("hf"))
        return "hf"

    monkeypatch.chdir(tmp_path)
    return write


def test_added_tokens_stand_for_themselves(folder):
    made, text = byte_level(), "a    b naïve café <tool>"
    made.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("    ", "naïve café", "<tool>")])
    found = open_vocabulary(folder(made))
    assert found.encode(text) == made.encode(text).ids and found.decode(found.encode(text)) == text
    assert found.eot == 1 and found.tokens[-3:] == [b"    ", "naïve café".encode(), b"<tool>"]


@pytest.mark.parametrize("make", (byte_level, sentence_piece))
def test_a_long_text_has_the_ids_of_the_whole(folder, monkeypatch, make):
    made, text = make(), (TEXT * 20).replace("noon", "noon" * 50) + "x" * 30 + 9 * "🙂"
    monkeypatch.setattr(Folder, "WINDOW", 500)
    monkeypatch.setattr(Folder, "MARGIN", 80)
    found = open_vocabulary(folder(made, {"config.json": {"eos_token_id": [1, 2]}}))
    assert found.encode(text, begin=False) == made.encode(text).ids and found.stops == {1, 2}
    assert found.decode(found.encode(text)) == made.decode(made.encode(text).ids) == text
    same = "y" * 3000  # windows that agree nowhere
    assert found.encode(same, begin=False) == made.encode(same).ids


def test_a_document_of_a_folder_s_vocabulary_is_not_cut(folder, run_here, monkeypatch):
    made = sentence_piece()
    Path("x.txt").write_text(TEXT * 3)
    monkeypatch.setattr(prepro_text, "PIECE", 1000)
    folder(made, {"config.json": {"eos_token_id": 2}})
    run_here(prepro_text, "x.txt", "--vocabulary", "hf", "--output", "x", "--processes", 1)
    ids = np.concatenate([open_tokens(f"x_{split}.bin", 500) for split in ("train", "val")]).tolist()
    assert ids == [2, *made.encode(TEXT * 3).ids]


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
    assert (config.V, config.Vp) == (290, 384) and not params.wte[290:].any() and params.wte[289].any()
    run_here(export_weights, "--to_hf", "model.bin", "again")
    assert json.loads(Path("again/config.json").read_text())["vocab_size"] == 290
    folder(byte_level(), rows=302)
    with pytest.raises(UserError, match="290 tokens, but the model has V=302"):
        load_vocabulary("model.bin", 302)


@pytest.mark.parametrize("files, words", (
    ({"config.json": "{"}, "config.json: is not JSON"), ({"config.json": "[]"}, "a JSON list, expected an object"),
    ({"config.json": {"eos_token_id": [[1]]}}, "expected a token's id"), ({"config.json": "{}"}, "which token ends"),
    ({"config.json": "[" * 9999}, "is not JSON"), ({"generation_config.json": "nul"}, "generation_config.json: is")))
def test_files_that_are_refused(folder, files, words):
    with pytest.raises(UserError, match=words):
        open_vocabulary(folder(byte_level(), files))


def test_tokens_longer_than_a_tokenizer_file_holds(folder, run_here):
    """It is said before a file is written."""
    made = byte_level()
    made.add_tokens(["=" * 300])
    Path("x.txt").write_text(TEXT)
    run_here(prepro_text, "x.txt", "--vocabulary", folder(made), "--output", "x", fails=("token 290 has 300 bytes",))
    assert sorted(os.listdir()) == ["hf", "x.txt"]
