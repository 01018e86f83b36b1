"""Chat templates: from a conversation, a list of messages, to text, tokens, and which of them an
assistant says. A template is that of a Hugging Face folder; vocabularies of one's own have OURS."""

import contextlib
import json
import os
from datetime import datetime

from llmc.errors import UserError, import_package
from llmc.files import open_input
from llmc.hf_tokenizer import EOT, read_object
from llmc.vocabulary import Folder, Gpt2

# Each message is a line, but an assistant's ends with the end-of-text token.
OURS = ("{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + '" + EOT + "' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '\n' }}{% endif %}{% endfor %}")
BEGIN, END = "\ue0f0", "\ue0f1"  # around what {% generation %} holds, while spans are found
MOST = 1 << 22  # characters that a template may make


@contextlib.contextmanager
def bounded_memory(size=1 << 30):
    """Context manager: what runs in it can allocate `size` bytes more. (A template can multiply a
    text.)"""
    try:
        import resource  # here: Windows has none

        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + size
    resource.setrlimit(resource.RLIMIT_AS,
                       (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def find_template(vocabulary):
    """(the text of a vocabulary's template, or None; its tokenizer_config.json)."""
    prefix = vocabulary.prefix
    settings = {}
    if isinstance(vocabulary, Folder):
        settings = read_object(f"{prefix}tokenizer_config.json")
    else:
        prefix = os.fspath(vocabulary.path).removesuffix("tokenizer.bin")
    if vocabulary.chat_template:
        return vocabulary.chat_template, settings
    beside = f"{prefix}chat_template.jinja"
    if os.path.lexists(beside):
        with open_input(beside, "mend or remove it") as f:
            return f.read().decode(errors="replace"), settings
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, of which transformers takes one by its name
        template = {named["name"]: named["template"] for named in template}
    return template.get("default") if isinstance(template, dict) else template, settings


class Template:
    """The chat template of a vocabulary."""

    def __init__(self, vocabulary, model, flag):
        """model: whose it is; flag: begins error messages. Raises UserError unless there is a valid
        template."""
        self.vocabulary = vocabulary
        self.flag = flag
        self.marks = False  # whether BEGIN and END are put around what {% generation %} holds
        self.has_marks = False  # whether the template has {% generation %}
        with self.errors_as_lines(f"{model} has no chat template in tokenizer_config.json or"
                                  " chat_template.jinja"):
            template, settings = find_template(vocabulary)
            if template is None:
                raise UserError(f"{flag}: {model} has no chat template: train it on chats, which"
                                " python prepro_text.py --chat makes")
            if not isinstance(template, str):
                raise TypeError("expected a text, or several, one of them named 'default'")
            tokens = {name: token.get("content") if isinstance(token, dict) else token
                      for name, token in settings.items() if name.endswith("_token")}
            self.names = {name: token for name, token in tokens.items() if token
                          and isinstance(token, str)}
            self.template = self.environment().from_string(template)

    @contextlib.contextmanager
    def errors_as_lines(self, what):
        """Context manager: an error of a template, which may be of any type, becomes a
        UserError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            # the message of jinja2 is without the template's text
            text = str(getattr(error, "message", None) or error)
            raise UserError(f"{self.flag}: {what} ({type(error).__name__}{line}: {text})") from None

    def environment(self):
        """The sandbox that transformers renders templates in: a template cannot run code outside
        it."""
        jinja2 = import_package("jinja2", "a chat template")
        template = self
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %}...{% endgeneration %}: marks answers for training, and renders what
            is inside."""

            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                answer = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                call = self.call_method("marked")
                return jinja2.nodes.CallBlock(call, [], [], answer).set_lineno(line)

            def marked(self, caller):
                template.has_marks = True
                return f"{BEGIN}{caller()}{END}" if template.marks else caller()

        def raise_exception(message):
            raise UserError(f"{template.flag}: the template says: {message}")

        def tojson(value, ensure_ascii=False, indent=None, **options):  # separators, sort_keys
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

        found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                              extensions=[Generation, "jinja2.ext.loopcontrols"])
        found.filters["tojson"] = tojson
        found.globals |= {"raise_exception": raise_exception,
                          "strftime_now": lambda how: datetime.now().strftime(how)}
        return found

    def render(self, messages, answers=False):
        """The text of a conversation; answers: up to where the assistant's next answer begins.
        Raises UserError if the template fails."""
        with self.errors_as_lines("the chat template fails"), bounded_memory():
            whole = self.template.render(messages=messages, tools=None, documents=None,
                                         add_generation_prompt=answers, **self.names)
        if len(whole) > MOST:
            raise UserError(f"{self.flag}: the chat template makes {len(whole)} characters of the"
                            " message")
        return whole

    def encode(self, text):
        """(ids, [(begin, end) of each token's characters]) of a rendered text."""
        if isinstance(self.vocabulary, Folder):
            found = self.vocabulary.backend.encode(text, add_special_tokens=False)
            return found.ids, found.offsets
        ids = []
        places = []
        begin = 0
        for number, part in enumerate(text.split(EOT)):
            if number:
                ids.append(self.vocabulary.eot)
                places.append((begin - len(EOT), begin))
            for new, first, last in self.encode_part(part):
                ids.append(new)
                places.append((begin + first, begin + last))
            begin += len(part) + len(EOT)
        return ids, places

    def encode_part(self, text):
        """Yield (id, begin, end) of a text's tokens, by a vocabulary that is not a folder's."""
        if isinstance(self.vocabulary, Gpt2):
            ids = self.vocabulary.encode(text)
            _, begins = self.vocabulary.encoding.decode_with_offsets(ids)
            for id, begin, end in zip(ids, begins, [*begins[1:], len(text)]):
                yield id, begin, max(end, begin + 1)  # a character may have several tokens
            return
        for at, letter in enumerate(text):
            for id in self.vocabulary.encode(letter, begin=False):
                yield id, at, at + 1

    def spans(self, messages):
        """(text, [(begin, end) of the characters of each of the assistant's answers, with what ends
        it]). Where the template does not mark them, an answer is the text rendered up to its end,
        without the text rendered up to where it begins. Raises NotPrefixes if these are no
        beginnings of the whole text."""
        self.marks, self.has_marks = True, False
        try:
            marked = self.render(messages)
        finally:
            self.marks = False
        text = marked.replace(BEGIN, "").replace(END, "")
        if self.has_marks:
            return text, spans_of_marks(marked)

        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], answers=True)
            after = self.render(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise NotPrefixes
            spans.append((len(before), len(after)))
        return text, spans

    def tokens(self, messages):
        """(ids, weights, ends) of a conversation: 1 for the tokens of answers, up to one that ends
        a text; how many tokens there are up to the end of each answer."""
        text, spans = self.spans(messages)
        ids, places = self.encode(text)
        weights = [0] * len(ids)
        ends = []
        for begin, end in spans:
            # as transformers, also a token that the answer shares with what is before it
            inside = [n for n, (first, last) in enumerate(places) if first < end and last > begin]
            stops = [n for n in inside if ids[n] in self.vocabulary.stops]
            if stops:  # the line break after it is not said
                inside = [n for n in inside if n <= stops[-1]]
            for n in inside:
                weights[n] = 1
            if inside:
                ends.append(inside[-1] + 1)
        return ids, weights, ends


class NotPrefixes(Exception):
    """A template renders messages differently when later ones follow."""


def spans_of_marks(marked):
    """[(begin, end)] in the text without BEGIN and END of what is between them."""
    spans = []
    length = 0
    for part in marked.replace(END, BEGIN).split(BEGIN):
        spans.append((length, length + len(part)))
        length += len(part)
    return spans[1::2]
