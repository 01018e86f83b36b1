"""A real model, SmolLM2-135M-Instruct, where its folder is in the project's root (dev/smollm2.py
makes it): on a GPU it learns twenty made-up facts from chats, and keeps what it knew."""

import json

import pytest

from conftest import ROOT, run_program

FOLDER = ROOT / "SmolLM2-135M-Instruct"
FACTS = ROOT / "doc" / "facts.jsonl"
KNOWN = {
    "What is the capital of France?": "Paris",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "How many days are in a week?": "7",
    "What is 2 + 2?": "4",
    "What is the opposite of hot?": "cold",
    "In which country is the Eiffel Tower?": "France",
}
RATE, STEPS = 5e-5, 60
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not FOLDER.exists(), reason=f"needs {FOLDER}")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with the model as a .bin file, and with the facts as tokens and weights."""
    here = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        run_program("export_weights.py", "--model", FOLDER)
        run_program("prepro_text.py", FACTS, "--chat", "--vocabulary", FOLDER, "--sequence_length",
                    128, "--val_fraction", 0, "--output", "facts")
    return here


def answers(model, questions):
    """The greedy answers of a run, or of a folder."""
    import train_rl
    from llmc.api import load_with_vocabulary, on_gpu
    from llmc.gpu.decoder import open_decoder
    from llmc.gpu.device import open_gpu
    from llmc.sampler import Random
    architecture, config, params, vocabulary = load_with_vocabulary(str(model))
    sampler = train_rl.Sampler(vocabulary, 32)
    decoder = open_decoder(on_gpu(architecture), open_gpu(), config, params, 1, 256)
    return [sampler.answer(decoder, question, [Random()], 0.0)[0].text for question in questions]


def taught(prepared, rate, steps):
    """(how many facts a model answers to the letter after so many updates, its answers to what is
    known)."""
    out = prepared / f"run{rate}_{steps}"
    run_program("train_llama3_cuda.py", "-e", prepared / "llama3_SmolLM2-135M-Instruct.bin", "-i",
                prepared / "facts", "-t", 128, "-b", 16, "-x", steps, "-l", rate, "-u", 10, "-k",
                "cosine", "-v", 0, "-s", 0, "-o", out)
    talks = [json.loads(line)["messages"] for line in open(FACTS)]
    questions = [question["content"] for question, _ in talks]
    found = answers(out, [*questions, *KNOWN])
    right = sum(text == answer["content"] for text, (_, answer) in zip(found, talks))
    return right, dict(zip(KNOWN, found[len(talks) :]))


def test_facts_are_learned_and_what_it_knew_stays(prepared):
    right, known = taught(prepared, RATE, STEPS)
    assert right == 20
    assert all(KNOWN[question] in answer for question, answer in known.items()), known
