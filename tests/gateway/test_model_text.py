"""Templates behave as those of checkpoints expect, and cannot do what they should not;
`generation_config.json` gives the defaults of requests that say nothing."""

from __future__ import annotations

import datetime
import importlib.util
import json
from pathlib import Path

import pytest

from gateway.generation import TargetModel
from gateway.model_text import ChatTemplate
from gateway.sampling import sampling_params
from gateway.schema import CompletionRequest
from shared.errors import CheckpointError, InvalidArgument
from shared.sampling_defaults import SamplingDefaults
from shared.text import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Grüß 🦊"},
    {"role": "assistant", "content": "  hi "},
    {"role": "user", "content": "bye"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# One for each thing templates in the wild rely on.
TEMPLATES = {
    "trimmed blocks": (
        "{{ bos_token }}\n{% for message in messages %}\n"
        "    {% if message['role'] == 'user' %}\nU:{{ message['content'] | trim }}\n"
        "    {% else %}\n{{ message.role }}:{{ message.content.strip() }}\n"
        "    {% endif %}\n{% endfor %}\n"
    ),
    "loop variables": (
        "{%- for m in messages -%}{{ loop.index0 }}{% if loop.last and add_generation_prompt %}"
        "!{% endif %}{%- endfor -%}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }};{% endfor %}"
    ),
    "namespaces and slices": (
        "{% set ns = namespace(found=false) %}{% for m in messages[1:] %}"
        "{% if m['role'] == 'assistant' %}{% set ns.found = true %}{% endif %}{% endfor %}"
        "{{ ns.found }}{{ messages[0]['content'] + eos_token }}"
    ),
    "json": "{{ messages[0] | tojson }}{{ {'b': 1, 'a': [1]} | tojson(indent=2) }}",
    "generation blocks": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "tests": "{% if tools is not none %}T{% endif %}{% if x is defined %}X{% else %}-{% endif %}",
    "macros": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{{ say(messages[0]) }}",
}


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, TOKENS).render(MESSAGES, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the oracle is not installed"
)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_templates_render_as_transformers_renders_them(
    name: str, add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **TOKENS,
    )
    assert render(TEMPLATES[name], add_generation_prompt=add_generation_prompt) == expected[0]


def test_the_clock_is_the_local_one() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_variables_reach_the_template_but_never_replace_the_messages() -> None:
    variables = {"enable_thinking": False, "messages": []}
    source = "{{ enable_thinking }}{{ messages | length }}"
    assert render(source, variables=variables) == "False4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ undefined_thing.field }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ [].__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_what_a_template_trips_over_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template refuses") as caught:
        render(source)
    assert caught.value.violations[0].field == "messages"


def test_a_refusal_carries_the_templates_words() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def write(folder: Path, config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<b>"}})
    template = ChatTemplate.read(tmp_path)
    assert template is not None
    assert template.render([]) == "<b>"


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    template = ChatTemplate.read(tmp_path)
    assert template is not None
    assert template.render([]) == "new"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, {"chat_template": templates})
    template = ChatTemplate.read(tmp_path)
    assert template is not None
    assert template.render([]) == "d"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert ChatTemplate.read(tmp_path) is None


@pytest.mark.parametrize("content", ['{"chat_template": "{% if %}"}', "[]", "{"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=tmp_path.name):
        ChatTemplate.read(tmp_path)


MODEL = TargetModel("m", "0", 100, 50, frozenset({0}))


def read(folder: Path, config: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.read(folder)


def test_a_request_says_more_than_the_model_and_the_model_more_than_openai(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    defaults = read(tmp_path, {"temperature": 0.6, "top_k": 20, "do_sample": False, "x": 1})
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": 5})
    sampling = sampling_params(body, defaults, MODEL, tokenizer)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)


def test_without_the_file_the_defaults_are_openais(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    assert SamplingDefaults().temperature == 1.0


@pytest.mark.parametrize("config", [{"temperature": 9}, [], {"top_p": "x"}])
def test_defaults_out_of_range_stop_the_start(tmp_path: Path, config: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, config)


def test_minus_one_switches_top_k_off(tokenizer: Tokenizer) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": -1})
    assert sampling_params(body, SamplingDefaults(top_k=7), MODEL, tokenizer).top_k == 0
