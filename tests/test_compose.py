from __future__ import annotations

from pathlib import Path

import pytest

from batchrun.assets import asset
from batchrun.compose import choices, compose_config, missing, template_folders
from batchrun.errors import ConfigError

HEADER = "# @package _global_\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config folder of the user's own."""
    (tmp_path / "mine" / "job").mkdir(parents=True)
    (tmp_path / "mine" / "sampling").mkdir()
    (tmp_path / "mine" / "sampling" / "wild.yaml").write_text("# Anything goes.\ntemperature: 1.5\n")
    return tmp_path / "mine"


def write_job(own: Path, text: str, name: str = "own") -> None:
    (own / "job" / f"{name}.yaml").write_text(text)


def test_own_job_with_own_group_option_and_template_beside_it(own: Path):
    write_job(own, HEADER + "defaults:\n  - override /sampling: wild\nprompt: {template_file: own.j2}\n")
    (own / "job" / "own.j2").write_text("{{ text }}")
    config = compose_config(["job=own"], own)
    assert config.sampling.temperature == 1.5
    assert config.prompt.template_file == str(own / "job" / "own.j2")


@pytest.mark.parametrize("place", ["file://{}", "{}", "'file://{}'"])
def test_hydra_searchpath_is_config_dir_by_another_name(own: Path, place: str):
    write_job(own, HEADER + "job: {name: own}\nprompt: {template_file: own.j2}\n")
    (own / "job" / "own.j2").write_text("{{ text }}")
    config = compose_config([f"hydra.searchpath=[{place.format(own)}]", "job=own"])
    assert (config.job.name, config.prompt.template_file) == ("own", str(own / "job" / "own.j2"))


def test_own_job_extends_a_shipped_one(own: Path):
    write_job(own, HEADER + "defaults:\n  - annotate\n  - _self_\nsampling: {max_tokens: 3}\n")
    config = compose_config(["job=own"], own)
    assert (config.sampling.max_tokens, config.output.completion) == (3, "label")
    assert config.prompt.template_file == str(asset("jobs") / "annotate.j2")


def test_own_job_hides_a_shipped_one_of_the_same_name(own: Path):
    write_job(own, HEADER + "job: {description: mine}\n", "annotate")
    config = compose_config(["job=annotate"], own)
    assert (config.job.description, config.output.completion) == ("mine", "completion")
    assert compose_config(["job=annotate"]).output.completion == "label"
    assert choices(own).jobs["annotate"] == "mine"


def test_the_command_line_wins_over_the_job(own: Path):
    write_job(own, HEADER + "sampling: {max_tokens: 3}\n")
    assert compose_config(["sampling.max_tokens=4", "job=own"], own).sampling.max_tokens == 4


def test_template_typed_on_the_command_line_is_looked_up_from_the_working_folder_first(own: Path, monkeypatch):
    (own / "annotate.j2").write_text("mine")
    monkeypatch.chdir(own)
    assert compose_config(["job=annotate"]).prompt.template_file == str(asset("jobs") / "annotate.j2")
    typed = compose_config(["job=annotate", "prompt.template_file=annotate.j2"])
    assert typed.prompt.template_file == str(own / "annotate.j2")


def test_chat_template_may_be_a_file_or_a_text(own: Path):
    (own / "job" / "plain.jinja").write_text("{{ messages }}")
    write_job(own, HEADER + "prompt: {chat_template: plain.jinja}\n")
    assert compose_config(["job=own"], own).prompt.chat_template == str(own / "job" / "plain.jinja")
    write_job(own, HEADER + "prompt: {chat_template: '{{ messages }}'}\n")
    assert compose_config(["job=own"], own).prompt.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            HEADER + "sampling: {max_token: 5}",
            "no setting 'sampling.max_token' in job/own.yaml: did you mean sampling.max_tokens",
        ),
        (HEADER + "samplng: {max_tokens: 5}", "no setting 'samplng' in job/own.yaml: did you mean sampling"),
        (HEADER + "input: {limit: many}", "input.limit in job/own.yaml: Value 'many'"),
        (HEADER + "prompt: {template: 'a ${text}'}", r"prompt.template.*write \\\$\{ for the characters"),
        (HEADER + "prompt: {template: 'a ${text'}", r"prompt.template.*write \\\$\{ for the characters"),
        (HEADER + "defaults: [{override /sampling: nope}]", "Could not find 'sampling/nope'"),
        (HEADER + "defaults: [own, _self_]", "a config file names itself in its `defaults`"),
        (HEADER + "a: {b: 1", "not YAML"),
        ("prompt: {template: x}", "must begin with the line `# @package _global_`"),
    ],
)
def test_mistakes_in_a_job_file(own: Path, job: str, message: str):
    write_job(own, job)
    with pytest.raises(ConfigError, match=message):
        compose_config(["job=own"], own)


def test_free_keys_go_into_dict_settings(own: Path):
    write_job(own, HEADER + "prompt: {chat_template_kwargs: {enable_thinking: false}}\n")
    config = compose_config(["job=own", "prompt.chat_template_kwargs.tone=dry"], own)
    assert config.prompt.chat_template_kwargs == {"enable_thinking": False, "tone": "dry"}


def test_slurm_array_reads_the_task(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    launch = compose_config(["launch=slurm_array"]).launch
    assert (launch.index, launch.count) == (2, 4)


def test_every_shipped_job_composes_and_lacks_only_its_data():
    for job in choices().jobs:
        config = compose_config([f"job={job}"])
        assert config.job.name == job
        assert config.job.description
        given = ["model=m", "input.path=x", "output.path=y"]
        assert missing(compose_config([f"job={job}", *given])) == []


def test_plan_and_preview_need_no_output():
    words = ["job=generate", "model=m", "input.path=x"]
    assert missing(compose_config([*words, "mode=plan"])) == []
    assert missing(compose_config([*words, "mode=preview"])) == []
    assert "output.path is not set" in missing(compose_config(words))[0]


def test_template_folders_end_with_the_shipped_jobs(own: Path):
    assert template_folders() == [asset("jobs")]
    assert template_folders(own) == [own / "job", asset("jobs")]


def test_a_prompt_that_is_typed_replaces_the_several_of_the_job() -> None:
    for words, source in (
        (["prompt.template=x"], ("x", None)),
        (["prompt.messages=said"], (None, "said")),
        (["input=openai"], (None, "messages")),
    ):
        prompt = compose_config(["job=judge", *words]).prompt
        assert (dict(prompt.prompts), (prompt.template, prompt.messages)) == ({}, source)
    several = compose_config(["job=generate", "prompt.prompts.a=x", "prompt.prompts.b=y"]).prompt
    assert (several.prompts, several.template_file) == ({"a": "x", "b": "y"}, None)
    one = compose_config(["job=judge", "prompt.prompts.a_first=x"]).prompt
    assert list(one.prompts) == ["a_first", "b_first"]
    assert one.prompts["a_first"] == "x"


def test_braces_empty_what_a_job_has_named() -> None:
    config = compose_config(["job=judge", "output.derived={}", "output.derived.mine=x", "prompt.variables={}"])
    assert config.output.derived == {"mine": "x"}
    assert compose_config(["job=translate", "prompt.variables={}"]).prompt.variables == {}
