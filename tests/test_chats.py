"""prepro_text.py --chat: which tokens are targets, beside transformers'; rows; what is refused; and from
a file of facts to answers."""

import json
from pathlib import Path

import numpy as np
import pytest

import evaluate
import generate
import prepro_text
import train_gpt2
from conftest import ROOT, assert_one_line_error
from llmc.api import load
from llmc.chat import BEGIN, END, NotPrefixes, Template, spans_of_marks
from llmc.dataloader import weights_beside
from llmc.errors import UserError
from llmc.sampler import Choice, Random
from llmc.vocabulary import Folder, open_vocabulary
from prepro import chats
from test_verdict import instead

FACTS = ROOT / "doc" / "facts.jsonl"
TALK = [{"role": "user", "content": "Hi, what is up?"},
        {"role": "assistant", "content": "Not much. Café 😀?"},
        {"role": "user", "content": "No.\nTea"}, {"role": "assistant", "content": " Tea it is! "}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
SPECIAL = "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>"

# name -> a template, where what is marked stands between (( and ))
TEMPLATES = {
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant'"
              " %}(({{ m.content + '<|im_end|>' }})){% else %}{{ m.content + '<|im_end|>' }}{% endif"
              " %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
              " }}{% endif %}",
    "a default system message": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help."
              "<|im_end|>\n{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if"
              " m.role == 'assistant' %}(({{ m.content + '<|im_end|>' }})){% else %}{{ m.content +"
              " '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt"
              " %}<|im_start|>assistant\n{% endif %}",
    "Mistral's kind": "<s>{% for m in messages %}{% if m.role == 'assistant' %}(({{ ' ' + m.content +"
              " '</s>' }})){% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
    "stripped": "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}(({{"
              " m.content | trim + '</s>' }})){% else %}{{ m.content | trim }}{% endif %}{{ '\n'"
              " }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "Llama 3's kind": "<s>{% for m in messages %}{{ '[' + m.role + ']\n\n' }}{% if m.role =="
                      " 'assistant' %}(({{ m.content | trim + '<|im_end|>' }})){% else %}{{"
                      " m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}{% if"
                      " add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}",
    "Gemma's kind": "<s>{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else"
                    " 'user' %}{{ '<|im_start|>' + role + '\n' }}{% if role == 'model' %}(({{"
                    " m.content + '<|im_end|>' }})){% else %}{{ m.content + '<|im_end|>' }}{% endif"
                    " %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n'"
                    " }}{% endif %}",
    "Alpaca's kind": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '### Response:\n' }}(({{"
                     " m.content + '</s>' }})){{ '\n\n' }}{% elif m.role == 'system' %}{{ m.content +"
                     " '\n\n' }}{% else %}{{ '### Instruction:\n' + m.content + '\n\n' }}{% endif %}"
                     "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "with a macro": "{% macro head(m) %}{{ '<|im_start|>' + m['role'] | upper + '\n' }}{% endmacro %}"
                    "{% set count = namespace(n=0) %}{% for m in messages %}{{ head(m) }}{% if m.role =="
                    " 'assistant' %}{% set count.n = count.n + 1 %}(({{ m.content }}<|im_end|>)){% else"
                    " %}{{ count.n ~ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}{% if"
                    " add_generation_prompt %}<|im_start|>ASSISTANT\n{% endif %}",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(template): a Hugging Face folder with it, of a byte-level tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trained.train_from_iterator(
        [json.dumps(TALK), "user assistant system\n"] * 9,
        tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=[*SPECIAL],
                                       initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                                       show_progress=False))

    def make(template):
        path = tmp_path_factory.mktemp("folder")
        trained.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({
            "chat_template": template, "eos_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast"}))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
        return path

    return make


def with_tags(template):
    return template.replace("((", "{% generation %}").replace("))", "{% endgeneration %}")


def without_tags(template):
    return template.replace("((", "").replace("))", "")


@pytest.mark.parametrize("has_tags", (True, False))
@pytest.mark.parametrize("messages", (TALK, SYSTEM + TALK[:2]), ids=("two answers", "a system"))
@pytest.mark.parametrize("name", TEMPLATES)
def test_targets_are_transformers_(folder_of, name, messages, has_tags):
    """transformers' mask is by tags; a template without them has the same targets."""
    transformers = pytest.importorskip("transformers")
    tagged = with_tags(TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder_of(tagged))
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True,
                                          return_assistant_tokens_mask=True)
    path = folder_of(tagged if has_tags else without_tags(TEMPLATES[name]))
    template = Template(Folder(path / "tokenizer.json"), path, "--vocabulary")
    ids, weights, ends = template.tokens(messages)
    assert ids == expected["input_ids"] and weights == expected["assistant_masks"]
    assert all(ids[end - 1] in (1, 3) for end in ends), "an answer ends with the token that ends it"
    assert len(ends) == sum(message["role"] == "assistant" for message in messages)


def test_spans_of_marks():
    assert spans_of_marks(f"ab{BEGIN}cd{END}e{BEGIN}{END}f") == [(2, 4), (5, 5)]
    assert spans_of_marks("abc") == []


@pytest.mark.parametrize("name", ("chars", "bytes", "gpt2"))
def test_vocabularies_of_one_s_own(tmp_path, name):
    """A user's message is a line; an answer ends with the end-of-text token."""
    try:
        vocabulary = open_vocabulary(name, "\n" + "".join(m["content"] for m in TALK))
    except UserError as error:
        pytest.skip(str(error))
    with pytest.raises(UserError, match="no chat template"):
        Template(vocabulary, "model", "--chat")
    vocabulary.chat_template = prepro_text.OURS
    ids, weights, ends = Template(vocabulary, "model", "--chat").tokens(TALK)
    said = [id for id, weight in zip(ids, weights) if weight]
    parts = []
    for message in TALK:
        parts += vocabulary.encode(message["content"] + "\n" * (message["role"] == "user"))
        parts += [vocabulary.eot] * (message["role"] == "assistant")
    assert sorted(ids) == sorted(parts) and ends[-1] == len(ids) and len(ends) == 2
    assert said.count(vocabulary.eot) == 2 and said[-1] == vocabulary.eot
    said = [id for id in said if id != vocabulary.eot]
    assert vocabulary.decode(said) == "".join(m["content"] for m in TALK[1::2])


FAULTS = {  # in Template.tokens
    "the end token left out": ("if n <= stops[-1]", "if n < stops[-1]"),
    "weights shifted by one": ("weights[n] = 1", "weights[n - 1] = 1"),
    "the line break after an answer": ("if stops:", "if False:"),
    "all tokens": ("weights = [0] * len(ids)", "weights = [1] * len(ids)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(folder_of, monkeypatch, fault):
    monkeypatch.setattr(Template, "tokens", instead(*FAULTS[fault])(Template.tokens))
    with pytest.raises(AssertionError):
        test_targets_are_transformers_(folder_of, "ChatML", TALK, False)


def test_a_template_that_changes_what_came_before(folder_of, here, run_here):
    """As Qwen3's, which drops earlier turns' reasoning: such conversations are left out."""
    changing = ("{% for m in messages %}{{ m.role + ': ' + (m.content if loop.last or m.role =="
                " 'user' else m.content[:3]) + '</s>' }}{% endfor %}")
    path = folder_of(changing)
    with pytest.raises(NotPrefixes):
        Template(Folder(path / "tokenizer.json"), path, "--vocabulary").tokens(TALK)
    lines = [json.dumps({"messages": talk}) for talk in (TALK, TALK[:2], TALK)]
    Path("x.jsonl").write_text("\n".join(lines))
    done = run_here(prepro_text, "x.jsonl", "--chat", "--vocabulary", path, "--output", "x",
                    "--sequence_length", 64, "--val_fraction", 0)
    assert "1 conversation, " in done.stdout
    assert ("warning: 2 conversations left out, such as x.jsonl:1: its template renders messages"
            in done.stderr and done.stderr.count("\n") == 1)


# --------------------------------------------------------------------------------------------------
# files


def say(*roles, text="Yes."):
    return [{"role": role, "content": text} for role in roles]


@pytest.mark.parametrize("record", (
    {"messages": TALK}, TALK, {"id": 7, "conversations": [
        {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
        for m in TALK]},
    {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]}),
    ids=("messages", "a list", "ShareGPT", "parts"))
@pytest.mark.parametrize("is_array", (False, True))
def test_formats(here, record, is_array):
    text = json.dumps([record] * 2 if is_array and isinstance(record, dict) else record)
    Path("x.jsonl").write_text(f"{text}\n\n{text}\n" if text.startswith("{") else text)
    found = list(chats.conversations("x.jsonl", False, lambda size: None))
    assert found and all(messages == TALK for _, messages in found)


def test_a_line_that_is_no_json(here, run_here):
    Path("x.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n{{'messages': [\n")
    run_here(prepro_text, "x.jsonl", "--chat", "--vocabulary", "bytes",
             fails=("x.jsonl:2: not JSON",))


@pytest.mark.parametrize("record, words", (
    ({"messages": say("assistant")}, ":2: message 1: assistant after nothing, expected one of user"),
    ({"messages": say("user", "user")}, "message 2: user after user"),
    ({"messages": say("user", "system")}, "message 2: system after user"),
    ({"messages": say("user", "assistant", "assistant")}, "message 3: assistant after assistant"),
    ({"messages": say("user", "robot")}, "role 'robot', expected system, user, assistant, tool"),
    ({"messages": say("user", "assistant", text=" ")}, "message 1: expected a text"),
    ({"messages": [{"role": "user"}]}, "expected a text as its content, found 'None'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected a text"),
    ({"messages": "Hi"}, "expected 'messages', a list"), ({"text": "Hi"}, "expected 'messages'"),
    ({"messages": []}, "expected 'messages'")))
def test_what_is_no_conversation(here, run_here, record, words):
    """A line that names the place, and nothing is written."""
    Path("x.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n{json.dumps(record)}\n")
    done = run_here(prepro_text, "x.jsonl", "--chat", "--vocabulary", "bytes", "--output", "x",
                    check=False)
    assert_one_line_error(done, "x.jsonl:2: ", words)
    assert [path.name for path in here.iterdir()] == ["x.jsonl"]


def test_what_else_is_refused(folder_of, here, run_here):
    Path("x.jsonl").write_text(json.dumps({"messages": say("user")}))
    Path("x.txt").write_text("Hello\n")
    flags = "--chat", "--vocabulary", "bytes", "--output", "x"
    run_here(prepro_text, "x.txt", *flags, fails=("x.txt: expected a conversation a line",))
    run_here(prepro_text, "x.jsonl", *flags, "--shard_tokens", 9, fails=("--shard_tokens",))
    run_here(prepro_text, "x.jsonl", *flags, "--sequence_length", 1, fails=("--sequence_length 1",))
    run_here(prepro_text, "x.txt", "--vocabulary", "chars", "--val_fraction", 0,
             fails=("--val_fraction 0.0: expected more than 0",))
    done = run_here(prepro_text, "x.jsonl", *flags, check=False)
    assert done.returncode == 1 and "no conversation with an answer among 1" in done.stderr
    refusing = folder_of("{{ raise_exception('only three') }}")
    Path("x.jsonl").write_text(json.dumps({"messages": TALK}))
    run_here(prepro_text, "x.jsonl", "--chat", "--vocabulary", refusing,
             fails=("x.jsonl:1: --vocabulary: the template says: only three",))
    run_here(prepro_text, "x.jsonl", *flags, "--sequence_length", 200,
             fails=("1 conversation, expected at least one to train on", "--val_fraction 0"))


# --------------------------------------------------------------------------------------------------
# rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_have_whole_conversations(seed):
    rng = np.random.default_rng(seed)
    T = 100
    lengths = rng.integers(1, 45, 400).tolist()
    rows = chats.pack(lengths, T)
    assert sorted(index for row in rows for index in row) == list(range(400))
    assert all(sum(lengths[i] for i in row) <= T for row in rows)
    assert len(rows) * T < 1.05 * sum(lengths)  # less than 5 percent are padding

    kept = [(rng.integers(1, 50, n).tolist(), rng.integers(0, 2, n).tolist()) for n in lengths]
    ids, weights = chats.rows_of(kept, T, 0, 3)
    assert ids.shape == weights.shape == (3 * len(rows), T)
    found = sorted(tuple(pair) for row in range(len(ids)) for pair in zip(ids[row], weights[row])
                   if pair[0])
    assert found == sorted(pair for one in 3 * kept for pair in zip(*one))
    assert not weights[ids == 0].any()
    text = [" ".join(map(str, row)) for row in ids]
    assert all(any(" ".join(map(str, one)) in row for row in text) for one, _ in kept[:50])


def test_a_long_conversation_ends_at_its_last_whole_answer(here, run_here):
    long = [*TALK, *say("user", "assistant", text="x" * 200)]
    late = say("user", "assistant", text="y" * 100)
    Path("x.jsonl").write_text("\n".join(json.dumps({"messages": m}) for m in (long, late, TALK)))
    done = run_here(prepro_text, "x.jsonl", "--chat", "--vocabulary", "bytes", "--output", "x",
                    "--sequence_length", 80)
    assert "2 conversations, " in done.stdout
    assert "; 1 end at the last answer within 80 tokens" in done.stdout
    assert "x.jsonl:2: its first answer ends beyond 80 tokens" in done.stderr
    sizes = [Path(f"x_{name}.bin").stat().st_size for name in ("train", "val")]
    assert sizes == [1024 + 2 * (256 * 80 + 1), 1024 + 2 * 81]  # a conversation each
    assert [Path(weights_beside(f"x_{name}.bin")).stat().st_size
            for name in ("train", "val")] == [256 * 80 + 1, 81]


def test_validation_is_on_other_conversations():
    kept = [([i] * (1 + i % 7), [1] * (1 + i % 7)) for i in range(100)]
    total = sum(len(ids) for ids, _ in kept)
    for count in (0, 1, total // 10, total // 2):
        train, val = chats.split(kept, count)
        assert sorted(train + val) == kept
        assert len(val) == (1 if count == 1 else len(val)) and bool(val) == bool(count)
        assert sum(len(ids) for ids, _ in val) <= max(count, 7)


def test_text_over_chats_has_no_weights(here, run_here):
    """An earlier file of weights would be another text's."""
    run_here(prepro_text, FACTS, "--chat", "--vocabulary", "chars", "--output", "x",
             "--sequence_length", 110)
    assert Path("x_train_weights.bin").exists() and Path("x_chat_template.jinja").exists()
    run_here(prepro_text, ROOT / "README.md", "--vocabulary", "chars", "--output", "x")
    assert not list(here.glob("x_*weights.bin")) and not Path("x_chat_template.jinja").exists()


# --------------------------------------------------------------------------------------------------
# from facts to answers


@pytest.mark.parametrize("vocabulary, T", (
    ("chars", 128), pytest.param("bpe:512", 64, marks=pytest.mark.large)))
def test_a_model_of_facts_answers(here, run_here, vocabulary, T):
    """All twenty, greedily; what it learns from are the answers; evaluate.py scores them alone."""
    run_here(prepro_text, FACTS, "--chat", "--vocabulary", vocabulary, "--output", "facts",
             "--sequence_length", T, "--val_fraction", 0)
    run_here(train_gpt2, *f"-e d2 -i facts -t {T} -b 4 -x 300 -v 0 -s 0 -o run".split())
    model = load("run")
    template = Template(model.tokenizer, "run", "--chat")
    lines = FACTS.read_text().splitlines()
    for line in lines:
        (question, answer) = (message["content"] for message in json.loads(line)["messages"])
        text = template.render([{"role": "user", "content": question}], answers=True)
        ids = np.array([template.encode(text)[0]], np.int32)
        said = []
        for (id,), _ in model.draw(ids, 100, [Random(1)], Choice(0.0, 0, 1.0)):
            if id in model.tokenizer.stops:
                break
            said.append(int(id))
        assert model.tokenizer.decode(said) == answer
    question, answer = (message["content"] for message in json.loads(lines[-1])["messages"])
    done = run_here(generate, "run", "--chat", "--temperature", 0, "--prompt", question)
    assert done.stdout.strip() == answer
    found = json.loads(run_here(evaluate, "run", "--data", "facts_train.bin", "--json").stdout)
    weights = np.fromfile("facts_train_weights.bin", np.uint8)
    assert found["tokens"] == weights.sum() and found["validation_loss"] < 0.05
