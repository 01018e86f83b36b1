"""Reading texts: files and folders -> documents, of plain text, JSON lines, JSON arrays or Parquet,
by what is in a file, never by its name."""

import codecs
import io
import itertools
import json
import os
import re

from llmc.dataloader import find_files
from llmc.errors import UserError, import_package
from llmc.files import open_input
from prepro.encodings import HINT, NotText, has_controls

PIECE = 1 << 20  # bytes read at a time; also about how many characters are tokenized at a time
LINES = 8  # the first ones of a file, which tell whether it is JSON lines
# a token ends between the two: inside tokens, whitespace follows only whitespace
TOKEN_ENDS = re.compile(r"\S[ \n]")


def find_texts(names):
    """Expand files, folders and globs: ({path: whether it was found in a folder}, number of hidden
    names skipped).

    Links are followed; each file and folder is visited once.
    """
    def refuse(error):
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); {HINT}")

    paths = {}
    seen = set()
    hidden = 0  # paths: real path -> (path, whether it was found in a folder)
    for name in names:
        matches = find_files(name)
        if not matches:
            raise UserError(f"{name}: no file matches")
        for match in matches:
            if not os.path.isdir(match):
                if os.path.exists(match) and not os.path.isfile(match):
                    raise UserError(f"{match}: expected a file, which can be read twice: save what"
                                    " comes through it")
                open_input(match, HINT).close()  # fail now if it cannot be read
                paths[os.path.realpath(match)] = match, False
                continue
            for directory, folders, files in os.walk(match, onerror=refuse, followlinks=True):
                real = os.path.realpath(directory)
                if real in seen:
                    folders.clear()
                    continue
                seen.add(real)
                shown = sorted(folder for folder in folders if folder[0] != ".")
                hidden += len(folders) - len(shown) + sum(file[0] == "." for file in files)
                folders[:] = shown
                for file in sorted(file for file in files if file[0] != "."):
                    path = os.path.join(directory, file)
                    paths.setdefault(os.path.realpath(path), (path, True))
    return dict(paths.values()), hidden


def read_text(path, advance=None):
    """Yield the text of a file in pieces, without byte order mark, with \\n line ends; raises
    NotText if not UTF-8."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(),
                                           translate=True)
    with open_input(path, HINT) as f:
        data = None
        while data != b"":
            data = f.read(PIECE)
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                byte = f.tell() - len(error.object) + error.start
                raise NotText(path, f"byte {byte}", error.object) from None
            if advance:
                advance(len(data))


def read_lines(texts):
    """Yield the lines of a text, an iterable of pieces."""
    pieces = []  # of a line
    for text in texts:
        *ends, begin = text.split("\n")
        for end in ends:
            yield "".join([*pieces, end])
            pieces.clear()
        pieces.append(begin)
    yield "".join(pieces)


def parse_object(text, begins=False):
    """Return the JSON object that a text is, or begins with; {} if there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text := text.strip())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and (begins or end == len(text)) else {}


def parse_json(text):
    """The JSON value that a text is; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def first_records(start):
    """What the records of a file with this start are, "line" or "element", and the first of them,
    as objects, {} for one that is none; or (None, []) where there are none."""
    if start.startswith("["):
        return "element", [parse_object(start[1:], begins=True)]
    if start.startswith("{"):
        lines = [line for line in start.split("\n")[:-1] if line.strip()]  # the last one may be cut
        return "line", [parse_object(line) for line in lines[:LINES] or [start]]
    return None, []


def records_of(path, field, found):
    """Return what a file's records are, "line" or "element", or None if it is plain text.

    It has records if it begins with JSON objects, of at most 16 MB: more than half of its first
    lines, or the first element of an array. A file found in a folder must also have the field in
    one of them. Other .jsonl files have lines, too, so that damage is an error. With the field '',
    all is plain text.
    """
    if not field:
        return None
    start = ""
    for piece in itertools.islice(read_text(path), 16):
        start = f"{start}{piece}".lstrip()
        what, first = first_records(start)
        is_cut = not any(first) and (what == "element" or "\n" not in start)
        if start and not (what and is_cut):
            break

    objects = [*filter(None, first)]
    has_field = any(field in record for record in objects)
    if 2 * len(objects) > len(first) and (has_field or not found):
        return what
    return "line" if path.lower().endswith(".jsonl") else None


def read_array(path, advance):
    """Return the elements of a JSON array, which must fit in memory."""
    try:
        return json.loads("".join(read_text(path, advance)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): mend it, or pass --field '' to read it as it"
                        " is") from None


def is_parquet(path):
    with open_input(path, HINT) as f:
        return f.read(4) == b"PAR1"


def read_parquet(path, field, advance):
    """Yield {field: text} of each row; "" for a row without text."""
    parquet = import_package("pyarrow.parquet", "a Parquet file")
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if field not in names:
            raise UserError(f"{path}: has columns {', '.join(names)}, expected {field!r} among"
                            " them: pass --field NAME")
        for batch in file.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                yield {field: "" if text is None else text}
    except (OSError, ValueError) as error:  # pyarrow's are of these two
        raise UserError(f"{path}: not a Parquet file ({error})") from None
    advance(os.path.getsize(path))


def read_field(path, field, what, advance):
    """Yield the document of each record, a line or an element; raises UserError for one without
    text in the field."""
    if what == "row":
        records = read_parquet(path, field, advance)
    else:
        records = (read_array(path, advance) if what == "element"
                   else read_lines(read_text(path, advance)))
    for number, record in enumerate(records, 1):
        if isinstance(record, str) and not record.strip():
            continue
        found = record
        record = parse_object(record) if isinstance(record, str) else record
        if not (isinstance(record, dict) and isinstance(record.get(field), str)):
            seen = f"{str(found)[:40]!r}: mend or remove the {what}"
            if record and isinstance(record, dict):
                texts = ", ".join(key for key in record if isinstance(record[key], str))
                seen = f"text in {texts or 'none'} of {', '.join(record)}: pass --field NAME"
            where = f"{path}:{number}" if what == "line" else f"{path}: {what} {number}"
            raise UserError(f"{where}: expected a JSON object with text in {field!r}, found"
                            f" {seen}, or --field '' to read the file as it is")
        # replace lone surrogates
        yield record[field].replace("\r\n", "\n").encode(errors="replace").decode()


def documents(path, field, found, advance, whole=False):
    """Yield (whether a document begins here, text) for the documents of a file, long ones in pieces
    unless `whole`."""
    if records := "row" if is_parquet(path) else records_of(path, field, found):
        yield from ((True, text) for text in read_field(path, field, records, advance) if text)
        return
    begins, rest = True, ""
    for text in read_text(path, advance):
        if has_controls(text) or found and "\0" in text:
            raise NotText(path, "control characters", text.encode())
        rest += text
        if len(rest) >= PIECE // 4 and not whole:  # characters have up to 4 bytes
            ends = [match.start() + 1
                    for match in TOKEN_ENDS.finditer(rest, max(0, len(rest) - 65536))]
            cut = ends[-1] if ends else len(rest)
            yield begins, rest[:cut]
            begins = False
            rest = rest[cut:]
    if rest:
        yield begins, rest


def jobs(paths, field, advance, whole):
    """Yield jobs: lists of the pairs of documents(), about PIECE characters each."""
    job = []
    size = 0
    for path, found in paths.items():
        for begins, text in documents(path, field, found, advance, whole):
            job.append((begins, text))
            size += len(text)
            if size >= PIECE:
                yield job
                job = []
                size = 0
    yield job
