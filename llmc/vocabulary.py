"""Vocabularies: text to ids and back, in bytes, characters, GPT-2's tokens or those of a Hugging Face folder. The
prepro programs open one by its name, programs that use a model that of the files beside it."""

import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from llmc.checkpoint import padded
from llmc.errors import UserError, import_package
from llmc.files import open_input, replacing
from llmc.tokenizer import FOLDER_FILES, Tokenizer, read_tokenizer, write_tokenizer

EOT = "<|endoftext|>"
GPT2_SHA256 = "f2da4ff514c07861464f0fa0120eca6a6137f0008fa0c43209b6b796c32fab99"  # of GPT-2's tokens in a row
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # Latin-1's; others are characters from U+0100 on
LETTERS = dict(zip(map(chr, [*PRINTABLE, *range(256, 324)]), [*PRINTABLE, *sorted({*range(256)} - {*PRINTABLE})]))


class Vocabulary(Tokenizer):
    """A tokenizer, and the ids of a text where one knows them: the three classes below."""

    unknown = None  # the id of what the vocabulary lacks, if it has one
    prefix = ""  # of the paths of a Hugging Face folder's files
    stops = property(lambda self: {self.eot})  # the ids that end a text
    special = property(lambda self: {self.eot})  # the ids that are not text
    is_gpt2 = functools.cached_property(lambda self: hashlib.sha256(b"".join(self.tokens)).hexdigest() == GPT2_SHA256)

    def encode(self, text, begin=True):
        """The ids of a text, a list; begin: after the token that begins one, if there is such a token. Names of special
        tokens are text, but in a folder's vocabulary. Raises UserError for what it lacks."""
        raise UserError(f"{self.path}: not GPT-2's vocabulary, no tokenizer.json beside it: pass --prompt_ids")

    def decode(self, ids):
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")

    def check_file(self):
        """Raise UserError if a tokenizer file, where a length is one byte, cannot hold it."""
        id = max(range(len(self.tokens)), key=lambda id: len(self.tokens[id]))
        if len(self.tokens[id]) > 255:
            raise UserError(f"{self.prefix}tokenizer.json: token {id} has {len(self.tokens[id])} bytes, in a tokenizer"
                            " file at most 255: make a vocabulary with max_token_length=255")


def valid(text):
    """A text whose lone surrogates, such as Python has for bytes that are not UTF-8, are U+FFFD, as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Letters(Vocabulary):
    """Bytes or characters as tokens."""

    ids = functools.cached_property(lambda self: {token: i for i, token in enumerate(self.tokens) if i != self.eot})

    def encode(self, text, begin=True):
        text, of = valid(text), {}  # of: a character -> its id, or those of its bytes
        for letter in dict.fromkeys(text):
            whole = letter.encode()
            tokens = [whole] if whole in self.ids else [bytes([byte]) for byte in whole]
            if not self.ids.keys() >= {*tokens}:
                raise UserError(f"the character {letter!r} is not among the {len(self.tokens)} tokens of the model")
            of[letter] = [self.ids[token] for token in tokens]
        return [id for letter in text for id in of[letter]]


class Gpt2(Vocabulary):
    """GPT-2's tokens, whose ids are the order of their merges."""

    @functools.cached_property
    def encoding(self):
        tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: id for id, token in enumerate(self.tokens) if id != self.eot}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: self.eot})

    def encode(self, text, begin=True):
        return self.encoding.encode_ordinary(text)


class Folder(Vocabulary):
    """The vocabulary of a Hugging Face folder with a tokenizer.json."""

    WINDOW, MARGIN = 1 << 18, 1 << 11  # characters of a long text that are encoded at a time, with more on both sides

    def __init__(self, path, eot=None):
        """path: of a tokenizer.json. eot, which separates documents, is the token that begins a text or, without one,
        the token that ends it: the argument, if no file names one. Raises UserError for a file that cannot be read."""
        with open_input(path, "expected gpt2, bytes, chars, a run or a Hugging Face folder with a tokenizer.json") as f:
            text = f.read().decode(errors="replace")
        tokenizers = import_package("tokenizers", "a vocabulary of Hugging Face")
        try:
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing narrower
            raise UserError(f"{path}: cannot be read ({error})") from None
        self.prefix = os.fspath(path).removesuffix("tokenizer.json")
        self.added = self.backend.get_added_tokens_decoder()
        self.unknown = self.backend.token_to_id(getattr(self.backend.model, "unk_token", None) or "")
        self.byte_level, ids = "ByteLevel" in str(self.backend.decoder), self.backend.get_vocab()
        begin, ends = self.backend.encode("").ids, self.end_ids() or [eot]
        if not begin and ends == [None]:
            raise UserError(f"{path}: no config.json or tokenizer_config.json beside it says which token ends a text")
        super().__init__([*map(self.bytes_of, range(1 + max(ids.values())))], (begin or ends)[0],
                         f"{self.prefix}tokenizer.bin")  # which would be beside its files
        self.starts, self.ends = begin, ends
        word = next((id for token, id in ids.items() if re.match(r"\u2581\w", token)), None)
        self.drops_space = word is not None and self.backend.decode([word])[0] != " "  # the one before the first word

    stops = property(lambda self: {*self.starts, *self.ends})
    special = property(lambda self: self.stops | {id for id, token in self.added.items() if token.special})

    def end_ids(self):
        """The ids that end a text, as the folder's other files say."""
        for name, key in (("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id"),
                          ("tokenizer_config.json", "eos_token")):
            found = read_object(self.prefix + name).get(key)
            if key == "eos_token" and found:
                found = self.backend.token_to_id(str(found["content"] if isinstance(found, dict) else found))
            if found is not None:
                found = found if isinstance(found, list) else [found]
                if not all(type(id) is int and id >= 0 for id in found):
                    raise UserError(f"{self.prefix}{name}: {key} is {found}, expected a token's id, or a list of them")
                if found := [id for id in found if id in self.backend.get_vocab().values()]:  # some have GPT-2's
                    return found
        return []

    def bytes_of(self, id):
        token = self.backend.id_to_token(id)
        if token is None:
            return b"\xef\xbf\xbd"  # U+FFFD: no token has this id
        if id in self.added:
            return token.encode()
        if self.byte_level and LETTERS.keys() >= set(token):
            return bytes(LETTERS[letter] for letter in token)
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    def encode(self, text, begin=True):
        """As above. Without `begin`, windows of a long text, which would take a hundred bytes of memory a character,
        are joined in the middle of where they overlap, where eight tokens in a row are the same."""
        text = valid(text)
        if begin or len(text) <= self.WINDOW + 2 * self.MARGIN:
            return self.backend.encode(text, add_special_tokens=begin).ids
        ids, last = [], []  # last: (where it begins, id) of the last window's tokens
        for first in range(0, len(text) - 2 * self.MARGIN, self.WINDOW):
            found = self.backend.encode(text[first : first + self.WINDOW + 2 * self.MARGIN], add_special_tokens=False)
            found, begin = [(first + start, id) for (start, _), id in zip(found.offsets, found.ids)], 0
            if last:
                middle = first + self.MARGIN
                known = {tuple(last[i : i + 8]): i for i in range(len(last) - 8) if last[i][0] >= middle}
                begin = next((i for i, (start, _) in enumerate(found)
                              if start >= middle and tuple(found[i : i + 8]) in known), None)
                if begin is None:
                    return self.backend.encode(text, add_special_tokens=False).ids
                del last[known[tuple(found[begin : begin + 8])] :]
            ids += [id for _, id in last]
            last = found[begin:]
        return ids + [id for _, id in last]

    def decode(self, ids):
        """As above, without the space that SentencePiece puts before the first word."""
        return super().decode(ids).removeprefix(" " * self.drops_space)


def read_object(path):
    """The JSON object in a file of a Hugging Face folder; {} if there is no such file."""
    if not os.path.lexists(path):
        return {}
    with open_input(path, "mend or remove it") as f:
        try:
            return dict(json.load(f))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: is not a JSON object ({error}): mend or remove it") from None


def open_vocabulary(name, characters=""):
    """The Vocabulary of a name. gpt2: 50257 tokens, which tiktoken downloads once; bytes: the 256 values; chars: the
    given characters, sorted; else that of a Hugging Face folder or a run. Raises UserError if it cannot be had."""
    if name in ("bytes", "chars"):
        tokens = [*map(str.encode, sorted(set(characters)))] if name == "chars" else [bytes([b]) for b in range(256)]
        return Letters([*tokens, EOT.encode()], len(tokens))
    if name == "gpt2":
        tiktoken = import_package("tiktoken", "GPT-2's vocabulary")
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' are OSErrors
            raise UserError(f"GPT-2's vocabulary could not be downloaded ({reason(error)}): set TIKTOKEN_CACHE_DIR to a"
                            " directory that holds it, or use another (prepro_text.py --vocabulary bytes)") from None
        return Gpt2([*map(encoding.decode_single_token_bytes, range(encoding.n_vocab))], encoding.eot_token)
    paths = encodes, tokens = [os.path.join(name, file) for file in ("tokenizer.json", "tokenizer.bin")]
    found = read_vocabulary(tokens) if [*map(os.path.exists, paths)] == [False, True] else Folder(encodes)
    found.encode("")  # raises UserError for another model's tokens without its tokenizer.json
    found.check_file()
    return found


def reason(error):
    """The innermost cause of a network error, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


def read_vocabulary(path):
    """Return the Vocabulary of a tokenizer file, with the tokenizer.json beside it if its tokens need one."""
    found = Vocabulary(*vars(read_tokenizer(path)).values())
    encodes = f"{os.fspath(path).removesuffix('tokenizer.bin')}tokenizer.json"
    letters = [token for id, token in enumerate(found.tokens) if id != found.eot]
    if all(len(letter.decode(errors="surrogateescape")) == 1 for letter in letters):
        found = Letters(found.tokens, found.eot, path)
    elif os.path.lexists(encodes):
        folder = Folder(encodes, found.eot)
        if len(folder.tokens) != len(found.tokens):
            raise UserError(f"{encodes}: {len(folder.tokens)} tokens, but {path} has {len(found.tokens)}: remove one")
        return folder
    elif found.is_gpt2:
        found = Gpt2(found.tokens, found.eot, path)
    return found


def save_vocabulary(path, vocabulary, version=2):
    """Write a vocabulary as llm.c's tokenizer file and, beside it, a folder's files, to encode and chat, or none."""
    write_tokenizer(path, vocabulary.tokens, vocabulary.eot, version)
    prefix, files = os.fspath(path).removesuffix("tokenizer.bin"), {}
    if isinstance(vocabulary, Folder):
        files = {"generation_config.json": json.dumps({"eos_token_id": vocabulary.ends}).encode()} | {
            name: source.read_bytes() for name in FOLDER_FILES if (source := Path(vocabulary.prefix + name)).exists()}
    for name in {*FOLDER_FILES} - {*files}:
        Path(prefix + name).unlink(missing_ok=True)
    for name, data in files.items():
        with replacing(prefix + name) as f:
            f.write(data)


def load_vocabulary(model, V, path=None):
    """The Vocabulary of a model with V tokens, fewer if the model is padded; None, with a warning, if there is none.
    path: its file, else beside the model: export_weights.py's NAME_tokenizer.bin, a run's tokenizer.bin, a Hugging Face
    folder's tokenizer.json or, if V is its size or that padded, gpt2_tokenizer.bin or bytes_tokenizer.bin."""
    directory = model if os.path.isdir(model) else os.path.dirname(model)
    label = re.sub(r"^(gpt2|llama3|speedrun)_|(_bf16)?\.bin$", "", os.path.basename(model))
    named, own, *shared = (os.path.join(directory, f"{of}tokenizer.bin") for of in (f"{label}_", "", "gpt2_", "bytes_"))
    path = path or next(filter(os.path.lexists, (named, own)), None)
    if not path and os.path.lexists(encodes := os.path.join(directory, "tokenizer.json")):
        found = Folder(encodes)
    else:
        sizes = {path: len(read_tokenizer(path).tokens) for path in filter(os.path.lexists, shared)} if not path else {}
        path = path or next((path for path, size in sizes.items() if V in (size, padded(size))), "")
        if not path:
            print(f"warning: {own}: no such file: tokens are printed as ids; pass --tokenizer FILE", file=sys.stderr)
            return None
        found = read_vocabulary(path)
    if (count := len(found.tokens)) > V or count < V and V % 8:
        raise UserError(f"{found.path}: {count} tokens, but the model has V={V}: pass --tokenizer FILE")
    return found
