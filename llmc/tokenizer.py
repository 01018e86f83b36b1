"""Tokenizer files, as llm.c's: header [2] V [3] id of end of text (version 2); for each id a length
byte, its bytes."""

import codecs
import dataclasses
import os
import re
import shutil

from llmc.checkpoint import padded
from llmc.dataloader import names_shards, tokenizer_beside, validation_name
from llmc.errors import UserError
from llmc.files import EXPORT, TOKENIZER_MAGIC, make_header, open_input, read_header, replacing

FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                "generation_config.json",
                "chat_template.jinja")


@dataclasses.dataclass
class Tokenizer:
    """A vocabulary: what each id stands for."""

    tokens: list  # id -> bytes
    eot: int
    path: str = ""  # the file that it was read from

    def __eq__(self, other):
        # also of a Vocabulary, which is a subclass
        return (self.tokens, self.eot) == (other.tokens, other.eot)

    def stream(self):
        """What turns ids into text, one at a time."""
        return ByteStream(self.tokens)


class ByteStream:
    """The text of ids, one at a time: a character of several tokens comes with the last of them."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id):
        """The text that an id adds."""
        return self.decoder.decode(self.tokens[id])

    def end(self):
        """The text of a character that lacks some of its tokens."""
        return self.decoder.decode(b"", final=True)


def read_tokenizer(path):
    """Read a tokenizer file of version 1 or 2; raises UserError for a damaged one."""
    is_gpt2 = os.path.basename(path) == "gpt2_tokenizer.bin"
    hint = EXPORT if is_gpt2 else "prepro_text.py writes one beside the tokens that it makes"
    with open_input(path, hint) as f:
        header = read_header(f, TOKENIZER_MAGIC, hint)
        version, V, eot = (int(x) for x in header[1:4])
        data = f.read()
    if version not in (1, 2):
        raise UserError(f"{path}: tokenizer version {version}, expected 1 or 2; {hint}")
    eot = 50256 if version == 1 else eot
    tokens = []
    end = 0
    for _ in range(min(V, len(data))):
        length = data[end] if end < len(data) else 0
        tokens.append(data[end + 1 : end + 1 + length])
        end += 1 + length
    if end != len(data) or b"" in tokens or not 0 <= eot < V == len(tokens):
        raise UserError(f"{path}: is damaged: {len(data)} bytes, but not of {V} tokens, end of"
                        f" text {eot}; {hint}")
    return Tokenizer(tokens, eot, path)


def write_tokenizer(path, tokens, eot, version=2):
    """Write a tokenizer file; tokens: a list of bytes, each 1 to 255 long. In version 1, eot must
    be 50256."""
    with replacing(path) as f:
        f.write(make_header(TOKENIZER_MAGIC, version, len(tokens),
                            *([eot] if version == 2 else [])))
        f.write(b"".join(bytes([len(token)]) + token for token in tokens))


def keep_tokenizer(directory, tokenizer):
    """Write tokenizer.bin, for the models in this directory; raises UserError if it exists and
    differs."""
    path = os.path.join(directory, "tokenizer.bin")
    if not os.path.lexists(path):
        for name in FOLDER_FILES if tokenizer.path else ():
            if os.path.exists(source := os.fspath(tokenizer.path).removesuffix("tokenizer.bin")
                              + name):
                target = os.path.join(directory, name)
                with open_input(source, EXPORT) as f, replacing(target) as copy:
                    shutil.copyfileobj(f, copy)
        write_tokenizer(path, tokenizer.tokens, tokenizer.eot)  # last: where it is, all are
    elif read_tokenizer(path) != tokenizer:
        raise UserError(f"{path}: is another vocabulary than {tokenizer.path}: choose another -o")


def find_tokenizer(model, V):
    """The path of the tokenizer file beside a model of V rows, or None: export_weights.py's
    NAME_tokenizer.bin, a run's tokenizer.bin or, if V is its size or that padded,
    gpt2_tokenizer.bin or bytes_tokenizer.bin."""
    directory = model if os.path.isdir(model) else os.path.dirname(model)
    label = re.sub(r"^(gpt2|llama3|speedrun)_|(_bf16)?\.bin$", "", os.path.basename(model))
    for name in (f"{label}_tokenizer.bin", "tokenizer.bin"):
        if os.path.lexists(path := os.path.join(directory, name)):
            return path
    # a Hugging Face folder's vocabulary is its own
    if os.path.lexists(os.path.join(directory, "config.json")):
        return None
    for name in ("gpt2_tokenizer.bin", "bytes_tokenizer.bin"):
        if os.path.lexists(path := os.path.join(directory, name)):
            size = len(read_tokenizer(path).tokens)
            if V in (size, padded(size)):
                return path
    return None


def load_tokenizer(settings):
    """Read the tokenizer file: --tokenizer, else the one beside the data (which becomes
    settings.tokenizer), else gpt2_tokenizer.bin. Returns None if there is none; raises UserError if
    --tokenizer is missing, or -j's differs."""
    val_data = settings.val_data
    if not val_data and settings.val_every and names_shards(settings.data):
        val_data = validation_name(settings.data)  # which may match files of other vocabularies
    beside = tokenizer_beside(settings.data)
    of_val = tokenizer_beside(val_data)
    if not settings.tokenizer and os.path.lexists(beside):
        settings.tokenizer = beside
    path = settings.tokenizer or "gpt2_tokenizer.bin"
    tokenizer = read_tokenizer(path) if settings.tokenizer or os.path.lexists(path) else None
    if (tokenizer and settings.val_data and os.path.lexists(of_val)
            and read_tokenizer(of_val) != tokenizer):
        raise UserError(f"-j {settings.val_data}: {of_val} is another vocabulary than {path}")
    return tokenizer
