"""Text to tokens and back, streamed without broken characters; the chat template's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from ninfer_pool.errors import ModelError, PromptError  # noqa: E402
from ninfer_pool.runner.chat_template import ChatTemplate  # noqa: E402
from ninfer_pool.runner.tokenizer import Tokenizer  # noqa: E402

SPECIAL, PLAIN = "<|im_end|>", "<think>"
CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ eos_token ~ '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)


def byte_tokenizer() -> Any:
    """One token a byte, a few merges, a special token and a plain added one."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he")]
    vocabulary |= {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([SPECIAL])
    inner.add_tokens([tokenizers.AddedToken(PLAIN, special=False)])
    return inner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": SPECIAL, "pad_token": {"content": SPECIAL}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return tmp_path


def load(folder: Path) -> Tokenizer:
    found = Tokenizer.load(folder)
    assert found is not None
    return found


TOKENIZER = Tokenizer(byte_tokenizer())


@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_a_stream_joined_is_the_whole_decoded(tokens: list[int]) -> None:
    for skip in (True, False):
        stream = TOKENIZER.stream(skip_special=skip)
        parts = [*(stream.push(token) for token in tokens), stream.finish()]
        assert "".join(parts) == TOKENIZER.decode(tokens, skip_special=skip)


def test_a_stream_cuts_no_character() -> None:
    stream, text = TOKENIZER.stream(), "a🙂é漢 the"
    parts = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert [part for part in parts if part] == ["a", "🙂", "é", "漢", " the"]
    assert stream.finish() == ""


def test_a_character_that_never_became_whole_comes_at_the_end() -> None:
    stream = TOKENIZER.stream()
    assert [stream.push(token) for token in TOKENIZER.encode("🙂")[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_known_and_left_out() -> None:
    tokens = TOKENIZER.encode(f"{PLAIN}he{SPECIAL}")
    assert tokens == [TOKENIZER.token_id(part) for part in (PLAIN, "he", SPECIAL)]
    assert TOKENIZER.special_token_ids == {TOKENIZER.token_id(SPECIAL)}
    assert TOKENIZER.decode(tokens) == f"{PLAIN}he"
    assert TOKENIZER.token_id("no such") is None


def test_a_folder_gives_its_tokenizer_and_template(folder: Path) -> None:
    tokenizer = load(folder)
    text = tokenizer.render([{"role": "user", "content": "the"}], add_generation_prompt=True)
    assert text == f"<|im_start|>user\nthe{SPECIAL}\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == tokenizer.token_id(SPECIAL)


@pytest.mark.parametrize("form", ["config", "named", "json"])
def test_the_template_may_lie_in_json(form: str, folder: Path) -> None:
    text = load(folder).render([{"role": "user", "content": "the"}])
    (folder / "chat_template.jinja").unlink()
    source: Any = [{"name": "default", "template": CHATML}] if form == "named" else CHATML
    name = "chat_template.json" if form == "json" else "tokenizer_config.json"
    value = {"chat_template": source}
    if form != "json":
        value |= json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    assert load(folder).render([{"role": "user", "content": "the"}]) == text


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).eos_token_id is None
    with pytest.raises(ModelError, match=r"chat_template: none; needs a folder"):
        load(tmp_path).render([])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_none_is_an_error(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(folder)


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "<b>“hé”</b>", "name": None},
    {"role": "assistant", "content": "x", "reasoning": "why"},
]
TEMPLATES = {
    "tojson keeps unicode, HTML and order": "{{ tools | tojson }}",
    "tojson indents": "{{ tools | tojson(indent=2) }}",
    "whole lines of tags vanish": "  {% if true %}\n  a\n  {% endif %}\nb\n",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}"
    "{% continue %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "a key that is None is absent": "{{ messages[0].name is defined }}",
    "reasoning by another name": "{{ messages[1].reasoning_content }}",
    "further arguments": "{{ enable_thinking is defined and not enable_thinking }}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}"
    "{% endfor %}{{ n.x }}",
    "no tools": "{% if documents or not tools %}none{% else %}{{ tools | length }}{% endif %}",
}
TOOLS = [{"type": "function", "function": {"name": "zé", "a": "<&>", "Z": [1, None, True]}}]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(source: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True}
    messages = utilities._normalize_chat_messages(MESSAGES)
    theirs, _ = utilities.render_jinja_template(
        [messages], chat_template=source, enable_thinking=False, **options
    )
    ours = ChatTemplate(source).render(MESSAGES, enable_thinking=False, **options)
    assert ours == theirs[0]


def test_a_template_says_no() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="messages: roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    with pytest.raises(PromptError, match="messages: "):
        ChatTemplate(source).render(MESSAGES)


def test_the_time_is_there() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).startswith("2")


def test_what_is_no_plain_json_is_an_error() -> None:
    template = ChatTemplate("{{ x }}")
    with pytest.raises(PromptError, match="template arguments: object; needs plain JSON"):
        template.render([], x=object())
    with pytest.raises(PromptError, match="messages: str; needs mappings"):
        template.render(["hello"])  # type: ignore[list-item]


def test_a_template_that_is_none_is_an_error() -> None:
    with pytest.raises(ModelError, match="chat_template: "):
        ChatTemplate("{% if %}")
