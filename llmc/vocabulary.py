"""Vocabularies: text to ids and back, in bytes, characters, GPT-2's tokens or those of a Hugging Face folder. To
tokenize text files, prepro/ loads an encoding; programs that use a model load its Vocabulary."""

import functools
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from llmc.errors import UserError, import_package
from llmc.files import open_input, replacing
from llmc.tokenizer import FOLDER_FILES, Tokenizer, read_tokenizer, write_tokenizer

EOT = "<|endoftext|>"
GPT2_SHA256 = "f2da4ff514c07861464f0fa0120eca6a6137f0008fa0c43209b6b796c32fab99"  # of GPT-2's tokens in a row


class PlainEncoding:
    """Bytes or characters as tokens, and end of text. Attributes and methods are named as tiktoken.Encoding's."""

    def __init__(self, name, tokens, encode):
        """tokens: bytes objects, without end of text, whose id is the last; encode(text): the list of its ids."""
        self.name, self.tokens, self.encode = name, [*tokens, EOT.encode()], encode
        self.eot_token, self.n_vocab = len(self.tokens) - 1, len(self.tokens)
        self.decode_single_token_bytes = self.tokens.__getitem__

    def decode(self, ids):
        return b"".join(map(self.decode_single_token_bytes, ids)).decode(errors="replace")


class HFEncoding(PlainEncoding):
    """The vocabulary of a Hugging Face folder with a tokenizer.json."""

    def __init__(self, path, eot=None):
        """path: of a folder's tokenizer.json. eot_token, which separates documents, is the token that begins a text or,
        in vocabularies without one, the token that ends it (`eot`, if no config.json names one). Raises UserError for
        a file that cannot be read, or if nothing says which token ends a text."""
        with open_input(path, "expected gpt2, bytes, chars or a Hugging Face folder with a tokenizer.json") as f:
            text = f.read().decode(errors="replace")
        tokenizers = import_package("tokenizers", "a vocabulary of Hugging Face")
        try:
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing narrower
            raise UserError(f"{path}: cannot be read ({error})") from None
        folder = os.path.dirname(os.path.abspath(path))
        self.path, self.name, self.n_vocab = path, os.path.basename(folder), self.backend.get_vocab_size()
        self.prefix = os.fspath(path).removesuffix("tokenizer.json")  # of the folder's other files
        self.special = {id for id, token in self.backend.get_added_tokens_decoder().items() if token.special}
        self.byte_level = "ByteLevel" in str(self.backend.decoder)
        self.unknown = self.backend.token_to_id(getattr(self.backend.model, "unk_token", None) or "")
        begin, ends = self.backend.encode("").ids, end_ids(self.prefix) or [eot]
        if not begin and ends == [None]:
            raise UserError(f"{path}: no config.json beside it says which token ends a text")
        self.eot_token, self.stops = (begin or ends)[0], {*begin, *ends}

    def encode(self, text, begin=True):
        """The ids of a text, after the token that begins one, if there is such a token."""
        return self.backend.encode(text, add_special_tokens=begin).ids

    def decode_single_token_bytes(self, id):
        token = self.backend.id_to_token(id)
        if token is None:
            return b"\xef\xbf\xbd"  # the model has more rows than the vocabulary tokens
        if id in self.special:
            return token.encode()
        if self.byte_level:
            return bytes(LETTERS[letter] if letter in LETTERS else 63 for letter in token)
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def end_ids(prefix):
    """The ids that end a text of a Hugging Face folder's model. prefix: of its files' paths."""
    for name in ("generation_config.json", "config.json"):
        try:
            with open(prefix + name, encoding="utf-8") as f:
                found = json.load(f).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def bytes_to_letters():
    """Return {byte: its character in a byte-level tokenizer}: printable Latin-1, or U+0100 and up for other bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


LETTERS = {letter: byte for byte, letter in bytes_to_letters().items()}


def load_encoding(vocabulary, characters=""):
    """Return the tiktoken.Encoding of 'gpt2', the PlainEncoding of 'bytes' or 'chars', or a folder's HFEncoding.
    gpt2: 50257 tokens, which tiktoken downloads once; raises UserError if that fails. bytes: the 256 byte values and
    end of text. chars: the given characters, sorted, and end of text."""
    if vocabulary == "bytes":
        return PlainEncoding(vocabulary, [bytes([byte]) for byte in range(256)], lambda text: list(text.encode()))
    if vocabulary == "chars":
        ids = {letter: id for id, letter in enumerate(sorted(set(characters)))}
        return PlainEncoding(vocabulary, map(str.encode, ids), lambda text: [ids[letter] for letter in text])
    if vocabulary != "gpt2":
        return HFEncoding(os.path.join(vocabulary, "tokenizer.json"))
    tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' are OSErrors
        raise UserError(f"GPT-2's vocabulary could not be downloaded ({reason(error)}): set TIKTOKEN_CACHE_DIR to a"
                        " directory that holds it, or use another (prepro_text.py --vocabulary bytes)") from None


def reason(error):
    """The innermost cause of a network error, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


LONGEST = 262144  # characters of whitespace; a million overflow the stack of tiktoken's regular expression
LONG_SPACE = re.compile(r"(?<!\s)\s{%d,}" % (LONGEST + 1))  # (?<!\s): begins once a run, not at each of its characters


def encode(encoding, text, **options):
    """Return the token ids of a text. Very long whitespace is encoded in pieces; `options` are tiktoken's."""
    if isinstance(encoding, HFEncoding):
        return encoding.encode(text, begin=False)
    if isinstance(encoding, PlainEncoding):
        return encoding.encode(text)
    ends = [end for run in LONG_SPACE.finditer(text) for end in range(run.start() + LONGEST, run.end(), LONGEST)]
    pieces = (text[start:end] for start, end in zip([0, *ends], [*ends, len(text)]))
    return [id for piece in pieces for id in encoding.encode(piece, **options)]


def save_vocabulary(path, encoding, version=2):
    """Write an encoding as llm.c's tokenizer file."""
    write_tokenizer(path, as_vocabulary(encoding).tokens, encoding.eot_token, version)
    if isinstance(encoding, HFEncoding):  # with the folder's files, which can encode and chat
        files = {"generation_config.json": json.dumps({"eos_token_id": end_ids(encoding.prefix)}).encode()}
        paths = {name: Path(encoding.prefix + name) for name in FOLDER_FILES}
        files |= {name: source.read_bytes() for name, source in paths.items() if source.exists()}
        for name, data in files.items():
            with replacing(path.removesuffix("tokenizer.bin") + name) as f:
                f.write(data)


@dataclass
class Vocabulary(Tokenizer):
    """A tokenizer that can encode: of bytes, characters or GPT-2's tokens, as its tokens show, or that of a folder."""

    folder: HFEncoding | None = field(default=None, compare=False)

    @property
    def stops(self):
        """The ids that end a text."""
        return self.folder.stops if self.folder else {self.eot}

    def encode(self, text):
        """The ids of a text, a list: GPT-2's or, in any other vocabulary, one for each character or each byte of it.
        "<|endoftext|>" is text like any other. Raises UserError for a character that the vocabulary lacks."""
        text = text.encode(errors="surrogateescape").decode(errors="replace")  # bytes of argv that are not UTF-8
        if self.folder:
            return self.folder.encode(text)
        if self.gpt2:
            return encode(self.gpt2, text, disallowed_special=())
        ids = []
        for letter in text:
            whole = letter.encode()
            pieces = [whole] if whole in self.ids else [bytes([byte]) for byte in whole]
            if not all(piece in self.ids for piece in pieces):
                raise UserError(f"the character {letter!r} is not in the model's vocabulary of {len(self.tokens)}"
                                " tokens")
            ids += [self.ids[piece] for piece in pieces]
        return ids

    def decode(self, ids):
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")

    @functools.cached_property
    def ids(self):
        return {token: id for id, token in enumerate(self.tokens)}

    @functools.cached_property
    def is_plain(self):
        """Whether each token, but for end of text, is a byte or a character."""
        return all(len(token) == 1 or len(token.decode(errors="surrogateescape")) == 1
                   for id, token in enumerate(self.tokens) if id != self.eot)

    @functools.cached_property
    def is_gpt2(self):
        return hashlib.sha256(b"".join(self.tokens)).hexdigest() == GPT2_SHA256

    @functools.cached_property
    def gpt2(self):
        """The tiktoken.Encoding of GPT-2's tokens, whose ids are the order of its merges; None for plain ones."""
        if self.is_plain:
            return None
        if not self.is_gpt2:
            raise UserError(f"{self.path}: not GPT-2's vocabulary, no tokenizer.json beside it: pass --prompt_ids")
        tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: id for token, id in self.ids.items() if id != self.eot}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: self.eot})


def as_vocabulary(encoding, V=0):
    """Return the Vocabulary of an encoding, with U+FFFD for what rows a model of V tokens has beyond it."""
    folder = encoding if isinstance(encoding, HFEncoding) else None
    path = f"{folder.prefix}tokenizer.bin" if folder else ""  # which would be beside its files
    tokens = [*map(encoding.decode_single_token_bytes, range(V or encoding.n_vocab))]
    return Vocabulary(tokens, encoding.eot_token, path, folder)


def load_vocabulary(model, V, path=None):
    """Return the Vocabulary of a model with V tokens; None, with a warning, if there is none. It is read from the file
    `path`; else from beside the model: the NAME_tokenizer.bin of export_weights.py, a run's tokenizer.bin, a Hugging
    Face folder's tokenizer.json or, if of V tokens, gpt2_tokenizer.bin or bytes_tokenizer.bin."""
    directory = model if os.path.isdir(model) else os.path.dirname(model)
    label = re.sub(r"^(gpt2|llama3)_|(_bf16)?\.bin$", "", os.path.basename(model))
    named, own, *shared = (os.path.join(directory, f"{of}tokenizer.bin") for of in (f"{label}_", "", "gpt2_", "bytes_"))
    path = path or next(filter(os.path.lexists, (named, own)), None)
    encodes = f"{os.fspath(path or own).removesuffix('tokenizer.bin')}tokenizer.json"
    if not path and os.path.exists(encodes):
        encoding = HFEncoding(encodes)
        if encoding.n_vocab > V:
            raise UserError(f"{encodes}: {encoding.n_vocab} tokens, but the model has V={V}")
        return as_vocabulary(encoding, V)
    path = path or next((path for path in filter(os.path.lexists, shared) if len(read_tokenizer(path).tokens) == V), "")
    if not path:
        print(f"warning: {own}: no such file: tokens are printed as ids; pass --tokenizer FILE", file=sys.stderr)
        return None
    found = Vocabulary(*vars(read_tokenizer(path)).values())
    if len(found.tokens) != V:
        raise UserError(f"{path}: {len(found.tokens)} tokens, but the model has V={V}: pass --tokenizer FILE")
    found.folder = HFEncoding(encodes, found.eot) if os.path.exists(encodes) and not found.is_plain else None
    return found
