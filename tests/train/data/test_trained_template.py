"""The template of a run in the tokenizer that it saves, with the run's variables as defaults."""

from itertools import product
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybridengine.run.config import DataConfig
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.template import set_trained_template, with_defaults
from tests.tiny_models import word_tokenizer

CHAT = [{"role": "user", "content": "w3"}]
BODIES = (
    "{{ messages[0].content }}{{ thinking }}|{{ style }}",
    "\n{{ thinking }}{{ style }}\n",
    "  {% if thinking %}yes{% else %}no{% endif %}\n {{ style }}",
    "{%- for m in messages %}\n{{ thinking }}{% endfor %}\n{{ style }}",
    "{% macro f() %}{{ thinking }}{{ style }}{% endmacro %}{{ f() }}",
    "{# a note #}\n  {% set n = namespace(x=thinking) %}\n{{ n.x }}{{ style }}",
)
VARIABLES = (
    {"thinking": False, "style": "a \"quoted\" 'text' %}\n{{ é 🙂"},
    {"thinking": True, "style": None},
    {"thinking": 0.5, "style": [1, {"a": "b"}]},
)


@pytest.mark.parametrize(("body", "variables"), [*product(BODIES, VARIABLES)])
def test_the_saved_template_renders_as_the_trained_one(tmp_path, body, variables):
    file = tmp_path / "template.jinja"
    file.write_text(body)
    data = DataConfig(chat_template=str(file), apply_chat_template_kwargs=variables)
    trained = ChatTemplate(word_tokenizer(), data)
    expected = trained.render("here", CHAT, True)
    tokenizer = word_tokenizer()
    set_trained_template(tokenizer, data, None)
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)

    def render(**given):
        return saved.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **given)

    assert render() == expected
    other = {"thinking": "other", "style": "another"}
    of_row = trained.of_row((), other).render("here", CHAT, True)
    assert render(**other) == of_row != expected  # a server's request may still choose
    again = DataConfig(apply_chat_template_kwargs=variables)  # as a run that goes on from it
    set_trained_template(saved, again, None)
    assert render() == expected and saved.chat_template == tokenizer.chat_template


def test_servers_see_the_variables():
    """vLLM gives a template only those variables that it names before it sets them."""
    from jinja2 import Environment, meta

    text = with_defaults("{{ messages }}{{ thinking }}", {"thinking": False})
    assert {"thinking", "messages"} <= meta.find_undeclared_variables(Environment().parse(text))


def test_without_a_template_nothing_is_set():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    set_trained_template(tokenizer, DataConfig(apply_chat_template_kwargs={"a": 1}), None)
    assert tokenizer.chat_template is None
    tokenizer.chat_template = {"default": "{{ a }}", "rag": "other"}
    set_trained_template(tokenizer, DataConfig(apply_chat_template_kwargs={"a": 1}), None)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "1"
    assert tokenizer.chat_template["rag"] == "other"


def test_a_processor_of_before_does_not_hide_the_trained_template(tmp_path: Path):
    """chat_template.json, and a template in processor_config.json, come before the tokenizer's."""
    from hybridengine.train.checkpoint.pretrained import save_tokenizer

    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    word_tokenizer().save_pretrained(base)
    (base / "chat_template.json").write_text('{"chat_template": "of before"}')
    (base / "processor_config.json").write_text('{"chat_template": "of before", "size": 3}')
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "trained"
    save_tokenizer(tokenizer, out)
    assert not (out / "chat_template.json").exists()
    assert "of before" not in (out / "processor_config.json").read_text()
    assert (out / "chat_template.jinja").read_text() == "trained"
