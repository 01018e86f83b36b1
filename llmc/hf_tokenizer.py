"""The tokenizers of Hugging Face folders, by the package tokenizers: tokenizer.json, or vocab.json with
merges.txt, and what the other files say."""

import json
import os

from llmc.errors import UserError, import_package
from llmc.files import open_input

EOT = "<|endoftext|>"
# Latin-1's; others are characters from U+0100 on
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = dict(zip(map(chr, [*PRINTABLE, *range(256, 324)]),
                   [*PRINTABLE, *sorted({*range(256)} - {*PRINTABLE})]))
OLDER_FILES = "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"


class JoinedStream:
    """As ByteStream, for a decoder that joins tokens by a rule of its own: an id's text is what it
    adds to that of the ids before it."""

    CONTEXT = 4  # ids that say how the next one is joined; also the bytes of a character

    def __init__(self, backend):
        self.backend = backend
        self.ids = []
        self.shown = 0  # shown: characters of the ids' text

    def text(self):
        return self.backend.decode(self.ids, skip_special_tokens=False)

    def add(self, id):
        self.ids.append(int(id))
        text = self.text()
        # perhaps the first bytes of a character
        if text.endswith("\ufffd") and len(self.ids) < 2 * self.CONTEXT:
            return ""
        new = text[self.shown :]
        self.ids = self.ids[-self.CONTEXT :]
        self.shown = len(self.text())
        return new

    def end(self):
        return self.text()[self.shown :]


def read_backend(prefix):
    """The tokenizers.Tokenizer of a folder. Raises UserError if no file has one."""
    tokenizers = import_package("tokenizers", "a vocabulary of Hugging Face")
    path = f"{prefix}tokenizer.json"
    is_older = not os.path.lexists(path) and has_words_and_merges(prefix)
    if is_older:
        path = f"{prefix}vocab.json"

    try:
        if is_older:
            found = byte_level_bpe(tokenizers, prefix)
        else:
            with open_input(path, how_to_make(prefix)) as f:
                found = tokenizers.Tokenizer.from_str(f.read().decode(errors="replace"))
    except UserError:
        raise
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{path}: cannot be read ({error})") from None

    found.no_truncation()  # a file may have both, of another use
    found.no_padding()
    return found


def has_words_and_merges(prefix):
    return os.path.lexists(f"{prefix}vocab.json") and os.path.lexists(f"{prefix}merges.txt")


def has_files(prefix):
    """Whether a Folder can be made of the files there."""
    return os.path.lexists(f"{prefix}tokenizer.json") or has_words_and_merges(prefix)


def how_to_make(prefix):
    """How to get a tokenizer.json, in a message."""
    there = next((name for name in OLDER_FILES if os.path.lexists(prefix + name)), None)
    if not there:
        return ("expected gpt2, bytes, chars, bpe:N, a run or a Hugging Face folder with a"
                " tokenizer.json")
    folder = repr(os.path.dirname(prefix) or ".")
    return (f"make it of {there} with: python -c \"from transformers import AutoTokenizer as A;"
            f" A.from_pretrained({folder}).save_pretrained({folder})\"")


def byte_level_bpe(tokenizers, prefix):
    """GPT-2's kind of tokenizer, of vocab.json and merges.txt."""
    path = f"{prefix}vocab.json"
    found = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(path, f"{prefix}merges.txt"))
    words = found.get_vocab()
    if any(word.endswith("</w>") for word in words):
        raise UserError(f"{path}: its words end in </w>, expected GPT-2's kind, of bytes: no"
                        f" tokenizer.json; {how_to_make(prefix)}")

    settings = read_object(f"{prefix}tokenizer_config.json")
    add_space = bool(settings.get("add_prefix_space"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_space)
    found.decoder = tokenizers.decoders.ByteLevel()

    named = [content_of(token) for key, token in settings.items() if key.endswith("_token")]
    found.add_special_tokens([name for name in dict.fromkeys([EOT, *named]) if name in words])
    added = read_object(f"{prefix}added_tokens.json")
    found.add_tokens(sorted(added, key=added.get))
    return found


def content_of(token):
    """The text of a special token in a folder's files, or None."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_object(path):
    """The JSON object in a file of a Hugging Face folder; {} if there is no such file."""
    if not os.path.lexists(path):
        return {}
    with open_input(path, "mend or remove it") as f:
        try:
            return dict(json.load(f))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: is not a JSON object ({error}): mend or remove it") from None


def our_tokenizer_files(config, tokenizer):
    """Return {name: content} of tokenizer.json, for Hugging Face's `tokenizers`, and
    tokenizer_config.json.

    A vocabulary of bytes or characters becomes a byte-pair encoding without merges; any other gives
    {}.
    """
    ids = {token: id for id, token in enumerate(tokenizer.tokens) if id != tokenizer.eot}
    letters = {token: token.decode(errors="replace") for token in ids}
    byte_level = None
    decoder = {"type": "Fuse"}
    if len(ids) == 256 and all(len(token) == 1 for token in ids):
        byte_level = decoder = {"type": "ByteLevel", "add_prefix_space": False,
                                "trim_offsets": False,
                                "use_regex": False}
        letters = {bytes([byte]): letter for letter, byte in LETTERS.items()}
    elif not all(len(letter) == 1 and letter.encode() == token
                 for token, letter in letters.items()):
        return {}
    special = {"id": tokenizer.eot, "content": EOT, "single_word": False, "lstrip": False,
               "rstrip": False,
               "normalized": False, "special": True}
    vocabulary = {letters[token]: id for token, id in ids.items()} | {EOT: tokenizer.eot}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": False,
             "vocab": vocabulary, "merges": []}
    tokenizer_json = {"version": "1.0", "truncation": None, "padding": None,
                      "added_tokens": [special],
                      "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
                      "decoder": decoder,
                      "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.maxT,
                "eos_token": EOT,
                "bos_token": EOT, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": json.dumps(tokenizer_json, indent=1).encode(),
            "tokenizer_config.json": json.dumps(settings, indent=2).encode()}
