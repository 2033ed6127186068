"""Every option, in its three spellings: Python, the command line and the environment."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trioserve.config import GROUPS, EngineConfig, ServerConfig
from trioserve.config.options import Option, options_from_environment, options_of, unknown_variables
from trioserve.protocol.errors import InvalidRequest

CLASSES = (EngineConfig, ServerConfig)
OPTIONS = [(cls, option) for cls in CLASSES for option in options_of(cls)]
NEEDS: dict[str, dict[str, Any]] = {
    "max_requests_per_key": {"api_key": ("key",)},
    "priority_api_key": {"api_key": ("key",)},
    "kv_offloading_dir": {"kv_offloading_bytes": 1 << 30},
    "worker_listen": {"worker_tls": "folder"},
    "disaggregation": {"data_parallel_size": 2},
    "pipeline_parallel_layers": {"pipeline_parallel_size": 2},
    "nnodes": {"distributed_executor_backend": "ray", "tensor_parallel_size": 322},
} | {
    name: {"ssl_certfile": "certificate"}
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
}
"""Options that go with nothing but others."""
each_option = pytest.mark.parametrize(
    ("cls", "option"), OPTIONS, ids=[option.name for _, option in OPTIONS]
)


def build(cls: type, **values: Any) -> Any:
    if cls is EngineConfig:
        return EngineConfig("m", **values)
    return ServerConfig(engine=EngineConfig("m"), **values)


def sample(option: Option) -> tuple[str, Any]:
    """Return a text that is not the option's default, with the value that it stands for."""
    if option.choices is not None:
        text = next(choice for choice in option.choices if choice != option.default)
        return text, text
    if option.kind is bool:
        return ("false", False) if option.default else ("true", True)
    if option.kind is str:
        texts = {
            "JSON": '{"top_k": 5}',
            "COUNTS": '{"image": 5}',
            "ARGUMENTS": '{"size": 5}',
            "SAMPLING": '{"video": {"fps": 5}}',
            "OBJECT": '{"method": "ngram"}',
            "HOST": "a.example",
            "WORD": "word",
            "URL": "http://x:1/y",
            "ORIGIN": "http://x",
            "NAME=PATH": "a=/b",
            "ADDRESS:PORT": "127.0.0.1:7000",
            "DEVICE": "cpu:0-3",
            "N,N": "3,2",
        }
        text = texts.get(option.metavar or "", "some text")
        return text, text
    number = {int: 321, float: 0.75}[option.kind] + (option.low or 0)
    return str(number), number


@each_option
def test_the_environment_gives_the_same_value_as_python(cls: type, option: Option) -> None:
    text, value = sample(option)
    if option.repeatable:
        other = "cpu" if option.metavar == "DEVICE" else f"{text}.org"
        if option.choices is not None:
            other = option.choices[1]
        text, value = f"{text}, {other}", (value, other)
    assert value != option.default
    read = options_from_environment(cls, {option.environment: text, "TRIOSERVE_OTHER": "1"})
    assert read == {option.name: value}
    config = build(cls, **NEEDS.get(option.name, {}), **read)
    assert getattr(config, option.name) == value


@each_option
def test_every_option_is_documented_and_its_default_is_allowed(cls: type, option: Option) -> None:
    assert option.group in GROUPS
    assert option.help
    assert not option.help.endswith(".")
    assert option.flag == "--" + option.name.replace("_", "-")
    assert option.environment == "TRIOSERVE_" + option.name.upper()
    config = build(cls)
    option.check(getattr(config, option.name))


def test_names_are_unique_and_there_are_few() -> None:
    names = [option.name for _, option in OPTIONS]
    assert len(set(names)) == len(names)
    assert len(names) <= 108


@pytest.mark.parametrize(
    ("cls", "name", "value", "message"),
    [
        (EngineConfig, "max_num_seqs", 0, "must be a whole number of at least 1; got 0"),
        (EngineConfig, "max_num_seqs", 2.5, "must be a whole number of at least 1; got 2.5"),
        (EngineConfig, "max_num_seqs", True, "must be a whole number of at least 1; got True"),
        (EngineConfig, "max_num_seqs", None, "must be a whole number of at least 1; got None"),
        (EngineConfig, "max_num_seqs", "8", "must be a whole number of at least 1; got '8'"),
        (EngineConfig, "seed", "x", "must be a whole number; got 'x'"),
        (EngineConfig, "otlp_traces_endpoint", "host:1", "http:// or https://; got 'host:1'"),
        (
            EngineConfig,
            "gpu_memory_utilization",
            0,
            "must be a number above 0 and at most 1; got 0",
        ),
        (EngineConfig, "gpu_memory_utilization", 1.5, "above 0 and at most 1; got 1.5"),
        (EngineConfig, "gpu_memory_utilization", math.nan, "above 0 and at most 1; got nan"),
        (EngineConfig, "enable_prefix_caching", 1, "must be true or false; got 1"),
        (EngineConfig, "dtype", "int3", "one of auto, float32, bfloat16, float16; got 'int3'"),
        (EngineConfig, "tokenizer", 3, "must be text; got 3"),
        (ServerConfig, "port", 70000, "must be a whole number from 0 to 65535; got 70000"),
        (ServerConfig, "send_timeout", math.nan, "must be a number of at least 0.01; got nan"),
        (ServerConfig, "api_key", ("a", ""), "must be text that isn't empty; got ''"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_limit(
    cls: type, name: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(cls, **{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} must be ")
    assert str(caught.value).endswith(message)


def test_stages_need_as_many_numbers_of_layers() -> None:
    config = EngineConfig("m", pipeline_parallel_size=3, pipeline_parallel_layers="4,10,2")
    assert config.layers_of_stages == [4, 10, 2]
    with pytest.raises(InvalidRequest, match="numbers for 3 stages, and --pipeline-parallel-size"):
        EngineConfig("m", pipeline_parallel_size=2, pipeline_parallel_layers="4,10,2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size 0 needs workers of other hosts"),
        ({"worker_tls": "folder"}, "worker_tls isn't for workers of Ray"),
        (
            {"nnodes": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "nnodes 4 doesn't divide the 6 processes of a worker",
        ),
    ],
)
def test_options_that_ray_has_no_use_for_are_refused(options: dict[str, Any], message: str) -> None:
    ray: dict[str, Any] = {"distributed_executor_backend": "ray"}
    config = EngineConfig("m", worker_listen="0.0.0.0:7000", data_parallel_size=2, **ray)
    assert config.num_workers == 0
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig("m", **ray, **options)


def test_hosts_of_a_worker_that_ray_does_not_place_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"for workers of Ray .* trioserve worker"):
        EngineConfig("m", nnodes=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("cls", "name", "text", "message"),
    [
        (EngineConfig, "max_num_seqs", "many", "must be a whole number of at least 1; got 'many'"),
        (EngineConfig, "gpu_memory_utilization", "half", "at most 1; got 'half'"),
        (EngineConfig, "enable_prefix_caching", "maybe", "must be true or false; got 'maybe'"),
    ],
)
def test_a_text_that_is_no_value_is_refused(cls: type, name: str, text: str, message: str) -> None:
    variable = f"TRIOSERVE_{name.upper()}"
    with pytest.raises(InvalidRequest, match=rf"^{name} must be ") as caught:
        options_from_environment(cls, {variable: text})
    assert str(caught.value).endswith(message)
    assert caught.value.param == name


def test_a_whole_number_is_a_number_and_one_string_is_a_list_of_one() -> None:
    config = build(ServerConfig, send_timeout=5, api_key="secret")
    assert config.send_timeout == 5
    assert config.api_key == ("secret",)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("OFF", False), ("0", False)]
)
def test_truth_is_spelled_in_several_ways(text: str, value: bool) -> None:
    read = options_from_environment(EngineConfig, {"TRIOSERVE_ENABLE_PREFIX_CACHING": text})
    assert read == {"enable_prefix_caching": value}


def test_an_empty_variable_sets_nothing() -> None:
    assert options_from_environment(ServerConfig, {"TRIOSERVE_API_KEY": ""}) == {}


def test_a_misspelt_variable_is_found() -> None:
    environment = {
        "TRIOSERVE_MAX_NUM_SEQ": "1",
        "TRIOSERVE_PORT": "1",
        "TRIOSERVE_ZZZ": "",
        "X": "",
    }
    assert unknown_variables(["port", "max_num_seqs"], environment) == [
        ("TRIOSERVE_MAX_NUM_SEQ", "TRIOSERVE_MAX_NUM_SEQS"),
        ("TRIOSERVE_ZZZ", None),
    ]


def test_options_come_over_those_of_a_whole_configuration() -> None:
    whole = EngineConfig("m", seed=1, max_num_seqs=3)
    assert EngineConfig.of("m", {"seed": 1, "max_num_seqs": 3}) == whole
    assert EngineConfig.of(whole, {}) == whole
    assert EngineConfig.of(whole, {"seed": 2}) == EngineConfig("m", seed=2, max_num_seqs=3)
    with pytest.raises(InvalidRequest, match="seed must be"):
        EngineConfig.of(whole, {"seed": "x"})
