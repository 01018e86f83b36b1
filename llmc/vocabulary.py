"""Vocabularies: text to ids and back, in bytes, characters, GPT-2's tokens or those of a Hugging
Face folder. The prepro programs open one by its name, programs that use a model that of the files
beside it."""

import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from llmc.errors import UserError, import_package
from llmc.files import replacing
from llmc.hf_tokenizer import (EOT, LETTERS, JoinedStream, content_of, has_files, read_backend,
                               read_object)
from llmc.tokenizer import FOLDER_FILES, Tokenizer, find_tokenizer, read_tokenizer, write_tokenizer

ENDS = EOT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]"  # if no file says what ends a text
BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's tokens for what has no token
# of GPT-2's tokens in a row
GPT2_SHA256 = "f2da4ff514c07861464f0fa0120eca6a6137f0008fa0c43209b6b796c32fab99"


class Vocabulary(Tokenizer):
    """A tokenizer, and the ids of a text where one knows them: the three classes below."""

    prefix = ""  # of the paths of a Hugging Face folder's files
    chat_template = None  # of one's own vocabulary: the text of its template, to be written
    is_exact = True  # whether a text is the bytes of its tokens, joined
    stops = property(lambda self: {self.eot})  # the ids that end a text
    special = property(lambda self: {self.eot})  # the ids that are not text
    is_gpt2 = functools.cached_property(
        lambda self: hashlib.sha256(b"".join(self.tokens)).hexdigest() == GPT2_SHA256)
    lengths = functools.cached_property(lambda self: np.array([len(token)
                                                               for token in self.tokens]))

    def encode(self, text, begin=True):
        """The ids of a text, a list; begin: after the token that begins one, if there is such a
        token. Names of special tokens are text, but in a folder's vocabulary. Raises UserError for
        what it lacks."""
        raise UserError(f"{self.path}: not GPT-2's vocabulary, no tokenizer.json beside it: pass"
                        " --prompt_ids")

    def measure(self, text):
        """The ids of a text, how many of its bytes each stands for, and the characters that no
        token stands for."""
        ids = self.encode(text, begin=False)
        return ids, self.lengths[ids].tolist() if ids else [], ""

    def decode(self, ids, after=()):
        """The text of ids, a list, where it follows that of the ids `after`. Bytes that are not
        UTF-8 become U+FFFD. Raises UserError for a number that is no id."""
        self.check(ids)
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")

    def check(self, ids):
        wrong = next((id for id in ids if not 0 <= id < len(self.tokens)), None)
        if wrong is not None:
            raise UserError(f"token id {wrong}: expected 0 to {len(self.tokens) - 1}")

    def check_file(self):
        """Raise UserError if a tokenizer file, where a length is one byte, cannot hold it."""
        id = max(range(len(self.tokens)), key=lambda id: len(self.tokens[id]))
        if len(self.tokens[id]) > 255:
            raise UserError(f"{self.prefix}tokenizer.json: token {id} has {len(self.tokens[id])}"
                            " bytes, in a tokenizer file at most 255: make a vocabulary with"
                            " max_token_length=255")


def valid(text):
    """A text whose lone surrogates, such as Python has for bytes that are not UTF-8, are U+FFFD, as
    in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Letters(Vocabulary):
    """Bytes or characters as tokens."""

    ids = functools.cached_property(lambda self: {token: i for i, token in enumerate(self.tokens)
                                                  if i != self.eot})

    def encode(self, text, begin=True):
        text = valid(text)
        of = {}  # of: a character -> its id, or those of its bytes
        for letter in dict.fromkeys(text):
            whole = letter.encode()
            tokens = [whole] if whole in self.ids else [bytes([byte]) for byte in whole]
            if not self.ids.keys() >= {*tokens}:
                raise UserError(f"the character {letter!r} is not among the {len(self.tokens)}"
                                " tokens of the model")
            of[letter] = [self.ids[token] for token in tokens]
        return [id for letter in text for id in of[letter]]


class Gpt2(Vocabulary):
    """GPT-2's tokens, whose ids are the order of their merges."""

    @functools.cached_property
    def encoding(self):
        tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: id for id, token in enumerate(self.tokens) if id != self.eot}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={EOT: self.eot})

    def encode(self, text, begin=True):
        return self.encoding.encode_ordinary(text)


class Folder(Vocabulary):
    """The vocabulary of a Hugging Face folder: its tokenizer.json, or vocab.json and merges.txt."""

    WINDOW = 1 << 18
    # characters of a long text that are encoded at a time, with more on both sides
    MARGIN = 1 << 11

    def __init__(self, path, eot=None):
        """path: of a tokenizer.json. eot, which separates documents, is the token that begins a
        text or, without one, the token that ends it: the argument, if no file names one. Raises
        UserError for a file that cannot be read."""
        self.prefix = os.fspath(path).removesuffix("tokenizer.json")
        self.backend = read_backend(self.prefix)
        self.added = self.backend.get_added_tokens_decoder()
        self.unknown = self.unknown_id()
        self.byte_level = "ByteLevel" in str(self.backend.decoder)

        ids = self.backend.get_vocab().values()
        if not 0 <= max(ids, default=-1) < 1 << 22:
            raise UserError(f"{path}: ids up to {max(ids, default=None)}, expected at least one,"
                            " and less than 2^22")

        self.frame = self.backend.encode("").ids  # what is put before a text, and after it
        mask = [*self.backend.encode("a").special_tokens_mask, 0]
        self.starts = self.frame[: mask.index(0)]

        self.ends = self.ends_of_generation()
        ends = [id for id in (self.named_end(), *self.ends, self.usual_end(), eot)
                if id is not None]
        if not self.starts + ends:
            raise UserError(f"{path}: no config.json or tokenizer_config.json beside it says which"
                            " token ends a text")
        self.ends = self.ends or ends[:1]
        super().__init__([*map(self.bytes_of, range(1 + max(ids)))], (self.starts + ends)[0],
                         f"{self.prefix}tokenizer.bin")  # which would be beside its files

    stops = property(lambda self: {*self.frame, *self.ends})
    special = property(lambda self: self.stops
                       | {id for id, token in self.added.items() if token.special})

    def unknown_id(self):
        """The id that stands for what the vocabulary lacks, or None."""
        if token := getattr(self.backend.model, "unk_token", None):
            return self.backend.token_to_id(token)
        ids = self.backend.encode("\U00010348", add_special_tokens=False).ids  # a Gothic letter
        return ids[-1] if ids and not BYTE.fullmatch(self.token(ids[-1])) else None

    def named_end(self):
        """The id of the token that ends a text, as the files beside tokenizer.json name it, or
        None."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if content := content_of(read_object(self.prefix + name).get("eos_token")):
                return self.backend.token_to_id(content)
        return None

    def usual_end(self):
        """The id of a token that ends texts by its spelling, or None."""
        known = map(self.backend.token_to_id, ENDS)
        return next((id for id in known if id is not None), None)

    def ends_of_generation(self):
        """The ids at which a model stops. A single one that is a word of the text is passed over:
        many a config.json has GPT2Config's default, 50256."""
        for name in ("generation_config.json", "config.json"):
            found = read_object(self.prefix + name).get("eos_token_id")
            ids = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(id) is int and id >= 0 for id in ids):
                raise UserError(f"{self.prefix}{name}: eos_token_id is {found}, expected a token's"
                                " id, or a list of them")
            ids = [id for id in ids if self.token(id) is not None]
            if len(ids) == 1 and ids[0] not in self.added and self.token(ids[0]) not in ENDS:
                continue
            if ids:
                return ids
        return []

    def token(self, id):
        """An id's token as tokenizer.json spells it, or None. (tokenizers takes no id of more than
        32 bits.)"""
        return self.backend.id_to_token(id) if id < 1 << 32 else None

    def bytes_of(self, id):
        """The bytes of a token within a text, between two others."""
        token = self.token(id)
        if token is None:
            return b"\xef\xbf\xbd"  # U+FFFD: no token has this id
        if self.byte_level:
            return (bytes(LETTERS[letter] for letter in token) if LETTERS.keys() >= set(token)
                    else token.encode())
        if byte := BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])

        decoder = self.backend.decoder
        join = decoder.decode if decoder else " ".join
        first = join(["a"])
        last = join(["a", "a"]).removeprefix(first)
        return join(["a", token, "a"]).removeprefix(first).removesuffix(last).encode() or b" "

    def encode(self, text, begin=True):
        text = valid(text)
        if len(text) <= self.WINDOW + 2 * self.MARGIN:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        else:
            ids = [id for *_, id in self.spans(text)]
        return self.starts + ids if begin else ids

    def spans(self, text):
        """[(start, stop, id)]: where each token of a text stands in it. Windows of a long text,
        which would take a hundred bytes of memory a character, are joined in the middle of where
        they overlap, where eight tokens in a row are the same."""
        def spans_of(start, stop):
            found = self.backend.encode(text[start:stop], add_special_tokens=False)
            return [(start + begin, start + end, id)
                    for (begin, end), id in zip(found.offsets, found.ids)]

        if len(text) <= self.WINDOW + 2 * self.MARGIN:
            return spans_of(0, len(text))
        done = []
        last = []  # last: the spans of the last window
        for start in range(0, len(text) - 2 * self.MARGIN, self.WINDOW):
            found = spans_of(start, start + self.WINDOW + 2 * self.MARGIN)
            join = 0
            if last:
                middle = start + self.MARGIN
                known = {tuple(last[i : i + 8]): i for i in range(len(last) - 8)
                         if last[i][0] >= middle}
                join = next((i for i, span in enumerate(found)
                             if span[0] >= middle and tuple(found[i : i + 8]) in known), None)
                if join is None:  # they agree nowhere
                    return spans_of(0, len(text))
                del last[known[tuple(found[join : join + 8])] :]
            done += last
            last = found[join:]
        return done + last

    @functools.cached_property
    def is_exact(self):
        """Whether it keeps every byte of a text that has what tokenizers change, drop or add."""
        text = "a A\u0301 \uff21\ufb01  b\t\n\nc.\u2603 \U00010348 d"
        return b"".join(self.tokens[id] for id in self.encode(text, begin=False)) == text.encode()

    def measure(self, text):
        text = valid(text)
        if self.is_exact:
            return super().measure(text)
        ids = []
        lengths = []
        lost = []
        done = 0
        for start, stop, id in self.spans(text):
            stop = max(stop, done)
            ids.append(id)
            lengths.append(len(text[done:stop].encode()))
            lost += text[done:stop] if id == self.unknown else text[done:start]
            done = stop
        return ids, lengths, "".join([*lost, text[done:]])

    def decode(self, ids, after=()):
        self.check(ids)
        if self.byte_level:
            return super().decode(ids)
        before = self.backend.decode([*after], skip_special_tokens=False)
        return self.backend.decode([*after, *ids], skip_special_tokens=False)[len(before) :]

    def stream(self):
        return super().stream() if self.byte_level else JoinedStream(self.backend)


def open_vocabulary(name, characters=""):
    """The Vocabulary of a name. gpt2: 50257 tokens, which tiktoken downloads once; bytes: the 256
    values; chars: the given characters, sorted; else that of a Hugging Face folder or a run. Raises
    UserError if it cannot be had."""
    if name in ("bytes", "chars"):
        tokens = ([*map(str.encode, sorted(set(characters)))] if name == "chars"
                  else [bytes([b]) for b in range(256)])
        return Letters([*tokens, EOT.encode()], len(tokens))
    if name == "gpt2":
        tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' are OSErrors
            raise UserError(f"GPT-2's vocabulary could not be downloaded ({reason(error)}): set"
                            " TIKTOKEN_CACHE_DIR to a directory that holds it, or use another"
                            " (prepro_text.py --vocabulary bytes)") from None
        return Gpt2([*map(encoding.decode_single_token_bytes, range(encoding.n_vocab))],
                    encoding.eot_token)
    encodes, tokens = (os.path.join(name, file) for file in ("tokenizer.json", "tokenizer.bin"))
    has_tokens_only = os.path.exists(tokens) and not os.path.exists(encodes)
    found = read_vocabulary(tokens) if has_tokens_only else Folder(encodes)
    found.encode("")  # raises UserError for another model's tokens without its tokenizer.json
    found.check_file()
    return found


def reason(error):
    """The innermost cause of a network error, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


def read_vocabulary(path):
    """Return the Vocabulary of a tokenizer file, with the tokenizer.json beside it if its tokens
    need one."""
    found = Vocabulary(*vars(read_tokenizer(path)).values())
    prefix = os.fspath(path).removesuffix("tokenizer.bin")
    encodes = f"{prefix}tokenizer.json"
    letters = [token for id, token in enumerate(found.tokens) if id != found.eot]
    if all(len(letter.decode(errors="surrogateescape")) == 1 for letter in letters):
        return Letters(found.tokens, found.eot, path)
    if found.is_gpt2 and not os.path.lexists(encodes):
        return Gpt2(found.tokens, found.eot, path)
    if has_files(prefix):
        folder = Folder(encodes, found.eot)
        if len(folder.tokens) != len(found.tokens):
            raise UserError(f"{encodes}: {len(folder.tokens)} tokens, but {path} has"
                            f" {len(found.tokens)}: remove one")
        return folder
    return found


def save_vocabulary(path, vocabulary, version=2):
    """Write a vocabulary as llm.c's tokenizer file and, beside it, a folder's files, to encode and
    chat, or none."""
    write_tokenizer(path, vocabulary.tokens, vocabulary.eot, version)
    prefix = os.fspath(path).removesuffix("tokenizer.bin")
    files = {}
    if vocabulary.chat_template:
        files = {"chat_template.jinja": vocabulary.chat_template.encode()}
    if isinstance(vocabulary, Folder):
        files |= {"tokenizer.json": vocabulary.backend.to_str().encode(),
                 "generation_config.json": json.dumps({"eos_token_id": vocabulary.ends}).encode()}
        sources = {name: Path(vocabulary.prefix + name) for name in FOLDER_FILES}
        files |= {name: source.read_bytes() for name, source in sources.items() if source.exists()}
    for name, data in files.items():
        with replacing(prefix + name) as f:
            f.write(data)
    for name in {*FOLDER_FILES} - {*files}:
        Path(prefix + name).unlink(missing_ok=True)


def load_vocabulary(model, V, path=None):
    """The Vocabulary of a model of V rows; None, with a warning, if there is none. path: its file,
    else that beside the model or, in a Hugging Face folder, its tokenizer.json."""
    directory = model if os.path.isdir(model) else os.path.dirname(model)
    path = path or find_tokenizer(model, V)
    if path:
        return read_vocabulary(path)
    if has_files(prefix := os.path.join(directory, "")):
        return Folder(f"{prefix}tokenizer.json")
    own = os.path.join(directory, "tokenizer.bin")
    print(f"warning: {own}: no such file: tokens are printed as ids; pass --tokenizer FILE",
          file=sys.stderr)
    return None
