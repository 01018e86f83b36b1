"""What a file is that is not UTF-8 text, by its bytes: text in another encoding, a packed format or
binary; and what makes UTF-8 of it."""

import re
import unicodedata

from llmc.errors import UserError
from llmc.files import open_input

HINT = "pass files of text, or folders with them"
UTF16 = "UTF-16", "iconv -f utf-16 -t utf-8 makes it UTF-8"
UTF32 = "UTF-32", "iconv -f utf-32 -t utf-8 makes it UTF-8"
KINDS = {  # how files begin that are not UTF-8 text: what they are, and what makes text of them
    b"\xff\xfe\0\0": UTF32, b"\0\0\xfe\xff": UTF32, b"\xff\xfe": UTF16, b"\xfe\xff": UTF16,
    b"\x1f\x8b": ("gzip", "gunzip unpacks it"), b"\x28\xb5\x2f\xfd": ("zstd", "unzstd unpacks it"),
    b"\xfd7zXZ": ("xz", "unxz unpacks it"), b"BZh": ("bzip2", "bunzip2 unpacks it"),
    b"PK\3\4": ("zip", "unzip unpacks it; save a .docx as text"),
}  # fmt: skip
WIDE = "utf-32le", "utf-32be", "utf-16le", "utf-16be"
ENCODINGS = {  # Python's name: what people call it. Of several that fit, an earlier one is likelier
    "cp1252": "Windows-1252", "cp1251": "Windows-1251", "koi8_r": "KOI8-R", "gb18030": "GBK",
    "cp932": "Shift-JIS", "euc_jp": "EUC-JP", "big5": "Big5", "euc_kr": "EUC-KR", "cp866": "CP866",
    "iso8859_5": "ISO-8859-5", "mac_cyrillic": "Mac Cyrillic", "cp1250": "Windows-1250",
    "iso8859_2": "ISO-8859-2", "cp1253": "Windows-1253", "cp1254": "Windows-1254",
    "cp1255": "Windows-1255", "cp1256": "Windows-1256", "cp1257": "Windows-1257", "cp850": "CP850",
    "mac_roman": "Mac Roman"}  # fmt: skip
ICONV = {  # where iconv's names are others
    "koi8_r": "koi8-r", "euc_jp": "euc-jp", "euc_kr": "cp949", "iso8859_5": "iso8859-5",
    "iso8859_2": "iso8859-2", "mac_cyrillic": "mac-cyrillic", "mac_roman": "macintosh"}  # fmt: skip
SCRIPTS = {"[\u3041-\u30ff]": ("cp932", "euc_jp"), "[\uac00-\ud7a3]": ("euc_kr",)}  # kana, Hangul
CONTROLS = re.compile("[\0-\6\x0e-\x19\x1c-\x1f]")  # which no text has
ODD = re.compile(  # what a wrong decoding has many of, and text next to none
    "[\x7f-\x9f\u02b0-\u036f\u2500-\u259f]"  # controls, accents without letters, boxes
    "|[\u3130-\u318f\uff61-\uff9f]"  # parts of Korean syllables, half-width kana
    "|(?<=[^\\W\\d_])[\xa1-\xbf\xd7\xf7](?=[^\\W\\d_])")  # signs within words


class NotText(UserError):
    """A file that is not UTF-8 text, but of some `kind`, as its bytes say."""

    def __init__(self, path, where, piece):
        """piece: bytes of the file, those at `where` among them."""
        with open_input(path, HINT) as f:
            self.kind, hint = kind_of(f.read(1 << 20), piece)
        super().__init__(f"{path}: not UTF-8 text ({where}); {hint}")


def has_controls(text):
    """Whether a quarter of a text or more is controls: it may be UTF-16 that is valid UTF-8."""
    start = text[: 1 << 16]
    return 4 * len(CONTROLS.findall(start)) >= max(1, len(start))


def kind_of(start, piece):
    """(kind, hint) of a file that begins with the bytes `start`, and whose `piece` is not UTF-8."""
    for magic, (kind, hint) in KINDS.items():
        if start.startswith(magic):
            return kind, f"it looks like {kind}: {hint}"
    if encoding := wide_encoding(start):
        kind = encoding[:-2].upper()
        hint = f"iconv -f {encoding} -t utf-8 makes it UTF-8"
        return kind, f"it looks like {kind} without a mark: {hint}"
    if CONTROLS.search((start + piece).decode("latin1")):
        return "binary", f"it looks like binary: {HINT}"

    letters = piece.decode(errors="replace")
    if sum(letter > "\x7f" for letter in letters) > 2 * letters.count("\ufffd"):
        hint = "iconv -c -f utf-8 -t utf-8 leaves out what is wrong"
        return "damaged UTF-8", f"it looks like damaged UTF-8: {hint}"

    try:
        likely = likely_encodings(piece)
        hint = "an editor may know its encoding"
    except ImportError:
        likely = []
        hint = "pip install charset-normalizer, and try again for its encoding"
    if not likely:
        return "non-UTF-8", f"save it as UTF-8: {hint}"
    names = " or ".join(map(ENCODINGS.get, likely))
    if len(likely) > 1:
        return names, f"it may be {names}: try iconv -f NAME -t utf-8, and look at the letters"
    hint = f"iconv -f {ICONV.get(*likely, *likely)} -t utf-8 makes it UTF-8"
    return names, f"it looks like {names}: {hint}"


def wide_encoding(start):
    """The UTF-16 or UTF-32 that a file without a byte order mark begins with, or None."""
    for encoding in WIDE:
        text = start.decode(encoding, "replace")[: 1 << 15]
        spaces = text.count(" ") + text.count("\n")
        kinds = map(unicodedata.category, re.sub("[\t\n\r\f]", "", text))
        odd = text.count("\ufffd") + sum(kind in ("Cc", "Cn", "Co", "Cs") for kind in kinds)
        if 500 * spaces > len(text) > 50 * odd:
            return encoding
    return None


def likely_encodings(piece):
    """The names of ENCODINGS, at most three, in which the letters of some bytes are plausible; []
    if that cannot be told. Raises ImportError without the package charset-normalizer."""
    import charset_normalizer

    first, *others = piece.split(b"\n")  # the first may begin within a letter
    foreign = [line for line in others if not line.isascii()] or [first]
    start = b"\n".join(foreign)[: 1 << 16]
    whole = re.match(rb".*[\0-/]", start, re.DOTALL)  # up to a byte that is no part of a letter
    order = [*ENCODINGS]
    found = []
    for match in charset_normalizer.from_bytes(whole[0] if whole else start, cp_isolation=order):
        text = str(match)
        names = filter(ENCODINGS.get, match.could_be_from_charset)  # which all give this text
        index = min(map(order.index, names))
        letters = sum(letter > "\x7f" for letter in text)
        has_script = all((5 * len(re.findall(script, text)) > letters) == (order[index] in ours)
                         for script, ours in SCRIPTS.items())
        if has_script and 50 * len(ODD.findall(text)) <= letters:
            found.append((match.chaos, -match.coherence, index))

    chaos, sense, _ = min(found, default=(0, 0, 0))
    close = [index for noise, less_sense, index in found
             if noise <= chaos + 0.01 and less_sense <= sense + 0.03]
    if not sense and len(close) > 1:  # of no language, in any of them
        return []
    return [order[index] for index in sorted(close)[:3]]
