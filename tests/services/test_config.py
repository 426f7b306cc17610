"""The file of services: what it can say, what overrides it, and each fault as one line with file, line and key."""

from __future__ import annotations

from dataclasses import fields
from textwrap import dedent

import pytest

from mainspring import ConfigError, RestartPolicy
from mainspring.services.config import OrchestratorConfig, parse_config, read_config
from mainspring.services.config_keys import keys_at
from mainspring.services.restarts import RestartType
from mainspring.services.spec import (
    ExecProbe,
    HealthCheckSettings,
    Hook,
    HookMoment,
    HookSettings,
    HttpProbe,
    Replacement,
    Resources,
    ServiceSpec,
    ShutdownSettings,
    StartupSettings,
    Strategy,
    TcpProbe,
)
from mainspring.services.yaml_tree import read_yaml

OF_THE_DOCS = """
lifecycle:                # durations as 60s, 5m, 1h or a number of seconds
  startup: {timeout: 60s, max_retries: 3, health_check_interval: 5s}
  shutdown: {timeout: 30s, drain_timeout: 20s, force_kill_timeout: 5s}
  health_check: {interval: 10s, timeout: 5s, max_failures: 3}
  restart_policy: {max_retries: 5, initial_delay: 1s, max_delay: 60s, backoff_factor: 2.0, reset_interval: 5m}
  hooks: {enabled: true, timeout: 10s}
services:
  store: {command: store --port 5000}
  worker:
    command: [mainspring, run, "app:group"]
    replicas: 4
    depends_on: [store]
    environment: {LOG_LEVEL: info}
    resources: {memory: 512MiB, cpu_seconds: 3600, open_files: 1024}
    probe: {http: "unix:{socket}/health/ready"}        # or tcp, exec, grpc
    hooks: {pre_start: [./migrate --all], post_stop: [[rm, -f, "a file"]]}
    lifecycle: {shutdown: {timeout: 120s}}             # overrides for this service
"""


def parse(text: str, **environment: str) -> OrchestratorConfig:
    return parse_config(dedent(text).encode(), name="up.yaml", environment=environment)


def service(text: str, **environment: str) -> ServiceSpec:
    (spec,) = parse(
        "services:\n  a:\n    command: run\n" + "".join(f"    {line}\n" for line in dedent(text).splitlines()),
        **environment,
    ).services
    return spec


def faults(text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, **environment)
    return str(caught.value).splitlines()


def fault(text: str, **environment: str) -> str:
    (line,) = faults(text, **environment)
    return line


def test_the_example_of_the_surface() -> None:
    config = parse(OF_THE_DOCS)
    store, worker = config.services
    assert (store.name, store.command, store.replicas) == ("store", ("store", "--port", "5000"), 1)
    assert worker.command == ("mainspring", "run", "app:group")
    assert (worker.replicas, worker.depends_on, worker.environment) == (4, ("store",), {"LOG_LEVEL": "info"})
    assert worker.resources == Resources(memory=512 << 20, cpu_seconds=3600, open_files=1024)
    assert worker.probe == HttpProbe("unix:{socket}/health/ready")
    assert worker.hooks == {
        HookMoment.PRE_START: (Hook(("./migrate", "--all")),),
        HookMoment.POST_STOP: (Hook(("rm", "-f", "a file")),),
    }
    assert worker.lifecycle.shutdown == ShutdownSettings(timeout=120, drain_timeout=20, force_kill_timeout=5)
    assert store.lifecycle.shutdown == ShutdownSettings(30, 20, 5)
    for spec in config.services:
        assert spec.lifecycle.startup == StartupSettings(60, 3, 5)
        assert spec.lifecycle.health_check == HealthCheckSettings(10, 5, 3)
        assert spec.lifecycle.restart_policy == RestartPolicy(5, 1, 60, 2.0, 300)
        assert spec.lifecycle.hooks == HookSettings(enabled=True, timeout=10)


def test_what_is_not_said_has_the_defaults_of_the_specification() -> None:
    assert parse("services: {a: {command: [run]}}").services == (ServiceSpec(name="a", command=("run",)),)


def test_all_that_a_service_can_say() -> None:
    spec = service(
        """\
        replicas: 2
        startup_probe: {tcp: "localhost:5000"}
        probe: {exec: test -e ready}
        ready_line: "^ready"
        notify: yes
        ready_after: 0.5
        restart: transient
        no_restart_statuses: [3, 64]
        core: false
        hooks:
          pre_stop: {command: ./drain now, timeout: 1m, abort: true}
        working_directory: /tmp
        user: nobody
        listen: ["127.0.0.1:0", "unix:/run/a.sock"]
        replace_after: {messages: 100, memory: 1.5GiB, age: 1h}
        """
    )
    assert spec == ServiceSpec(
        name="a",
        command=("run",),
        replicas=2,
        startup_probe=TcpProbe("localhost:5000"),
        probe=ExecProbe(("test", "-e", "ready")),
        ready_line="^ready",
        notify=True,
        ready_after=0.5,
        restart=RestartType.TRANSIENT,
        no_restart_statuses=frozenset({3, 64}),
        core=False,
        hooks={HookMoment.PRE_STOP: (Hook(("./drain", "now"), timeout=60, abort=True),)},
        working_directory="/tmp",
        user="nobody",
        listen=("127.0.0.1:0", "unix:/run/a.sock"),
        replace_after=Replacement(messages=100, memory=3 << 29, age=3600),
    )


def test_a_file_can_say_each_field_of_a_specification() -> None:
    assert {each.name for each in fields(ServiceSpec)} - {"name"} == set(keys_at(("services", "a")))
    for group, kind in (
        ("startup", StartupSettings),
        ("shutdown", ShutdownSettings),
        ("health_check", HealthCheckSettings),
        ("restart_policy", RestartPolicy),
        ("hooks", HookSettings),
    ):
        assert [each.name for each in fields(kind)] == keys_at(("services", "a", "lifecycle", group))
    assert [each.name for each in fields(Resources)] == keys_at(("services", "a", "resources"))
    assert [each.name for each in fields(Replacement)] == keys_at(("services", "a", "replace_after"))
    assert list(HookMoment) == keys_at(("services", "a", "hooks"))


def test_the_settings_of_the_whole() -> None:
    config = parse(
        """\
        strategy: rest_for_one
        max_restarts: 10
        period: 2m
        services: {a: {command: [run]}}
        """
    )
    assert (config.strategy, config.max_restarts, config.period) == (Strategy.REST_FOR_ONE, 10, 120)
    assert parse(OF_THE_DOCS).shutdown == ShutdownSettings(30, 20, 5)


def test_the_settings_of_all_and_of_one_merge_key_by_key() -> None:
    config = parse(
        """\
        lifecycle: {shutdown: {timeout: 50, force_kill_timeout: 1}, startup: {timeout: 5}}
        services:
          a: {command: [run]}
          b: {command: [run], lifecycle: {shutdown: {drain_timeout: 40}, startup: {}}}
        """
    )
    a, b = (spec.lifecycle for spec in config.services)
    assert (a.shutdown, b.shutdown) == (ShutdownSettings(50, 20, 1), ShutdownSettings(50, 40, 1))
    assert a.startup == b.startup == StartupSettings(timeout=5)


# -------------------------------------------------------------------------------------------------------- environment


def test_the_environment_comes_before_the_file() -> None:
    store, worker = parse(
        OF_THE_DOCS,
        MAINSPRING_LIFECYCLE__SHUTDOWN__TIMEOUT="45s",
        MAINSPRING_SERVICES__WORKER__REPLICAS="8",
        MAINSPRING_SERVICES__WORKER__ENVIRONMENT__Mode="x",
        MAINSPRING_SERVICES__WORKER__PROBE='{"http": "http://localhost:80/"}',
        MAINSPRING_SERVICES__STORE__COMMAND='["store", 5]',
        MAINSPRING_URL="memory://other",
        MAINSPRING_SERVICE="worker",
    ).services
    assert store.lifecycle.shutdown == ShutdownSettings(45, 20, 5)
    assert worker.lifecycle.shutdown == ShutdownSettings(120, 20, 5)
    assert (worker.replicas, worker.environment) == (8, {"LOG_LEVEL": "info", "Mode": "x"})
    assert worker.probe == HttpProbe("http://localhost:80/")
    assert store.command == ("store", "5")


def test_the_settings_of_the_whole_may_come_from_the_environment() -> None:
    text = "services: {a: {command: [run]}}"
    config = parse(text, MAINSPRING_STRATEGY="one_for_all", MAINSPRING_MAX_RESTARTS="3")
    assert (config.strategy, config.max_restarts) == (Strategy.ONE_FOR_ALL, 3)


def test_a_variable_for_a_mapping_and_one_for_a_key_of_it() -> None:
    found = service(
        "",
        MAINSPRING_SERVICES__A__RESOURCES='{"open_files": 5}',
        MAINSPRING_SERVICES__A__RESOURCES__MEMORY="1MiB",
        MAINSPRING_SERVICES__A__NO_RESTART_STATUSES="[1, 2]",
    )
    assert found.resources == Resources(memory=1 << 20)
    assert found.no_restart_statuses == {1, 2}


def test_services_are_found_by_how_their_names_are_spelled() -> None:
    text = "services: {a-b: {command: [run]}, a: {command: [run]}, a__c: {command: [run]}}"
    variables = {
        f"MAINSPRING_SERVICES__{name}__REPLICAS": count for name, count in (("A_B", "2"), ("A", "3"), ("A__C", "4"))
    }
    assert [spec.replicas for spec in parse(text, **variables).services] == [2, 3, 4]


def test_a_fault_of_the_environment_names_the_variable() -> None:
    text = "services: {a: {command: [run]}, b-c: {command: [run]}, b_c: {command: [run]}}"
    assert fault(text, MAINSPRING_LIFECYCLE__SHUTDOWN__TIMEOUT="soon").startswith(
        "MAINSPRING_LIFECYCLE__SHUTDOWN__TIMEOUT: lifecycle.shutdown.timeout: 'soon' is no duration; allowed: 60s, 5m"
    )
    assert fault(text, MAINSPRING_LIFECYCEL__SHUTDOWN__TIMEOUT="1").startswith(
        "MAINSPRING_LIFECYCEL__SHUTDOWN__TIMEOUT: lifecycel: unknown key, did you mean lifecycle?; allowed: lifecycle, services"
    )
    assert fault(text, MAINSPRING_SERVICES__B__REPLICAS="1") == (
        "MAINSPRING_SERVICES__B__REPLICAS: services: no service of the file is spelled so; allowed:"
        " MAINSPRING_SERVICES__NAME__KEY with NAME of A, B_C, B_C"
    )
    assert "services: b-c and b_c are spelled so; allowed:" in fault(text, MAINSPRING_SERVICES__B_C__REPLICAS="1")


def test_an_operator_may_cut_drains_short_but_a_file_may_not() -> None:
    assert fault("lifecycle: {shutdown: {drain_timeout: 60s}}\nservices: {a: {command: [run]}}") == (
        "up.yaml:1: lifecycle.shutdown.drain_timeout: 60 s do not fit into shutdown.timeout, which cuts the drain after 30 s;"
        " allowed: at most shutdown.timeout"
    )
    config = parse(OF_THE_DOCS, MAINSPRING_LIFECYCLE__SHUTDOWN__TIMEOUT="5s")
    assert config.services[0].lifecycle.shutdown == ShutdownSettings(5, 20, 5)
    assert service("lifecycle: {shutdown: {timeout: 5s}}").lifecycle.shutdown == ShutdownSettings(5, 20, 5)


# ------------------------------------------------------------------------------------------------------------- faults


def test_each_fault_has_a_line_of_its_own_and_they_come_in_order() -> None:
    found = faults(
        """\
        lifecycle:
          startup: {timeout: 60x, max_retry: 3}
          shutdown: 30
        servics: {}
        services:
          a:
            replicas: four
            depends_on:
              - b
              - []
          b!: {command: run}
        """
    )
    assert [line.partition("; allowed")[0] for line in found] == [
        "up.yaml:2: lifecycle.startup.timeout: '60x' is no duration",
        "up.yaml:2: lifecycle.startup.max_retry: unknown key, did you mean max_retries?",
        "up.yaml:3: lifecycle.shutdown: '30' is no mapping",
        "up.yaml:4: servics: unknown key, did you mean services?",
        "up.yaml:6: services.a: the key command is missing",
        "up.yaml:7: services.a.replicas: 'four' is no such number",
        "up.yaml:10: services.a.depends_on[1]: a list is no text",
        "up.yaml:11: services.b!: 'b!' is no name",
    ]
    assert all("; allowed: " in line for line in found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("replicas: 0", "replicas: '0' is no such number; allowed: a whole number from 1"),
        ("replicas: 1.5", "replicas: '1.5' is no such number; allowed: a whole number from 1"),
        ("replicas: [1]", "replicas: a list is no such number; allowed: a whole number from 1"),
        ("core: maybe", "core: 'maybe' is neither true nor false; allowed: true, false"),
        ("restart: always", "restart: 'always' is no such word; allowed: permanent, transient, temporary"),
        (
            "no_restart_statuses: [256]",
            "no_restart_statuses[0]: '256' is no such number; allowed: a whole number from 0 to 255",
        ),
        ("no_restart_statuses: 3", "no_restart_statuses: '3' is no list; allowed: a list"),
        (
            "ready_line: '('",
            "ready_line: '(' is no regular expression: missing ), unterminated subpattern at position 0;",
        ),
        ("environment: {A: }", 'environment.A: there is no value; allowed: a text, "" for an empty one'),
        ("environment: {A=B: c}", "environment.A=B: 'A=B' is no name of a variable; allowed: a text without '='"),
        ("resources: {memory: 5XB}", "resources.memory: '5XB' is no size; allowed: 512MiB, 1GiB"),
        (
            "resources: {niceness: 20}",
            "resources.niceness: '20' is no such number; allowed: a whole number from -20 to 19",
        ),
        ("resources: 1GiB", "resources: '1GiB' is no mapping; allowed: a mapping"),
        (
            "replace_after: {age: 0}",
            "replace_after.age: '0' is no time; allowed: 60s, 5m, 1h, 1d or a number of seconds, above 0",
        ),
        ("probe: {}", "probe: it names no kind of probe; allowed: a mapping with one of http, tcp, exec, grpc"),
        ("probe: http://a", "probe: 'http://a' is no mapping; allowed: a mapping with one of http, tcp, exec, grpc"),
        (
            "probe: {http: 'http://a/', tcp: 'a:1'}",
            "probe: http and tcp stand together; allowed: a mapping with one of",
        ),
        (
            "probe: {http: localhost/health}",
            "probe: 'localhost/health' is no such URL; allowed: http://host:port/path,",
        ),
        (
            "probe: {tcp: localhost}",
            "probe: 'localhost' is no address; allowed: host:port, an IPv6 address in brackets",
        ),
        ("probe: {grpc: {service: a}}", "probe: it names no address; allowed: host:port, or a mapping"),
        ("probe: {exec: }", "probe: it names no kind of probe"),
        ("listen: [80]", "listen[0]: '80' is no address; allowed: host:port"),
        ("listen: ['unix:a.sock']", "listen[0]: 'unix:a.sock' is no absolute path; allowed: host:port, unix:/path"),
        ("listen: ['a:1', 'a:1']", "listen[1]: 'a:1' belongs to service a already; allowed: an address of its own"),
        (
            "hooks: {pre_start: [./migrate, --all]}",
            "hooks.pre_start[1]: '--all' looks like an argument of the command before it",
        ),
        ("hooks: {pre_start: [{timeout: 3}]}", "hooks.pre_start[0]: the key command is missing"),
        ("hooks: {pre_start: [{command: a, abort: 7}]}", "hooks.pre_start[0].abort: '7' is neither true nor false"),
        ("hooks: {pre_run: []}", "hooks.pre_run: unknown key, did you mean pre_start?; allowed: pre_start, post_start"),
        (
            "depends_on: [a]",
            "depends_on: services wait for each other: a needs a; allowed: dependencies without a cycle",
        ),
        ("depends_on: [b]", "depends_on[0]: there is no service 'b'; allowed: nothing, as it is the only service"),
        ("working_directory: ''", "working_directory: the text is empty; allowed: a text"),
        (
            "lifecycle: {restart_policy: {initial_delay: 2m}}",
            "lifecycle.restart_policy: max_delay must be at least initial_delay (120.0 s), not 60.0",
        ),
        (
            "lifecycle: {restart_policy: {jitter: some}}",
            "lifecycle.restart_policy.jitter: 'some' is no such word; allowed: full, equal, none",
        ),
        ("lifecycle: {startup: {timeout: 0}}", "lifecycle.startup.timeout: '0' is no time; allowed: 60s"),
        ("lifecycle: {startup: {timeout: 1e9d}}", "lifecycle.startup.timeout: '1e9d' is too long; allowed: 60s"),
        (
            "lifecycle: {restart_policy: {backoff_factor: nan}}",
            "lifecycle.restart_policy.backoff_factor: 'nan' is no such number;",
        ),
    ],
)
def test_what_a_service_cannot_say(line: str, expected: str) -> None:
    found = fault(f"services:\n  a:\n    command: run\n    {line}\n")
    assert found.startswith(f"up.yaml:4: services.a.{expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("services: {}", "up.yaml:1: services: there is no service; allowed: a mapping of names to services"),
        ("lifecycle: {}", "up.yaml:1: services: there is no service; allowed: a mapping of names to services"),
        ("services: [a]", "up.yaml:1: services: a list is no mapping; allowed: a mapping"),
        ("services: {a: }", "up.yaml:1: services.a: the key command is missing; allowed: a mapping that has it"),
        (
            "services: {a: {command: }}",
            "up.yaml:1: services.a: the key command is missing; allowed: a mapping that has it",
        ),
        (
            "services: {a: {command: []}}",
            "up.yaml:1: services.a.command: it names no program; allowed: a list of words, or one text",
        ),
        (
            "services: {a: {command: ' '}}",
            "up.yaml:1: services.a.command: it names no program; allowed: a list of words, or one text",
        ),
        (
            "services: {a: {command: {}}}",
            "up.yaml:1: services.a.command: a mapping is no command; allowed: a list of words, or one text",
        ),
        (
            'services: {a: {command: "a \'b"}}',
            (
                'up.yaml:1: services.a.command: "a \'b" cannot be split into words: No closing quotation; allowed: a list of'
                " words, or a text with its quotes closed"
            ),
        ),
        (
            "services: {a: {command: [x, ]}}\nperiod: 5",
            "up.yaml:2: period: without max_restarts it says nothing; allowed: with max_restarts",
        ),
        (
            "services: {a: {command: x}}\nstrategy: all",
            "up.yaml:2: strategy: 'all' is no such word; allowed: one_for_one, one_for_all, rest_for_one",
        ),
    ],
)
def test_what_a_file_cannot_say(text: str, expected: str) -> None:
    assert fault(text) == expected


def test_a_cycle_and_an_address_of_two_services_are_named() -> None:
    found = faults(
        """\
        services:
          a: {command: x, depends_on: [b], listen: ["h:1", "h:0"]}
          b: {command: x, depends_on: [c], listen: ["h:1", "h:0"]}
          c: {command: x, depends_on: [a, d]}
          d: {command: x}
        """
    )
    assert [line.partition("; allowed")[0] for line in found] == [
        "up.yaml:2: services.a.depends_on: services wait for each other: a needs b needs c needs a",
        "up.yaml:3: services.b.listen[0]: 'h:1' belongs to service a already",
    ]


def test_a_fault_of_the_settings_of_all_is_said_once() -> None:
    text = """\
        lifecycle: {restart_policy: {max_delay: 0.5}}
        services: {a: {command: x}, b: {command: x}}
        """
    assert fault(text) == (
        "up.yaml:1: lifecycle.restart_policy: max_delay must be at least initial_delay (1.0 s), not 0.5"
    )


# --------------------------------------------------------------------------------------------------------------- YAML


def test_values_are_what_the_author_wrote() -> None:
    spec = service("environment: {A: yes, B: 0644, C: 12:30, D: 2026-01-02, E: 1_000, F: '', G: ~text, H: .inf}")
    assert list(spec.environment.values()) == ["yes", "0644", "12:30", "2026-01-02", "1_000", "", "~text", ".inf"]


def test_keys_without_a_value_count_as_not_said() -> None:
    config = parse("lifecycle:\nstrategy: ~\nservices:\n  a:\n    command: run\n    environment:\n    probe: null\n")
    assert config.services == (ServiceSpec(name="a", command=("run",)),)


def test_aliases_and_merged_mappings() -> None:
    a, b = parse(
        """\
        services:
          a: &base {command: x, environment: &all {A: "1", B: "2"}}
          b: {<<: *base, replicas: 2, environment: {<<: [*all, {C: "3"}], B: "5"}}
        """
    ).services
    assert (b.command, b.replicas, b.environment) == (("x",), 2, {"A": "1", "B": "5", "C": "3"})
    assert a.environment == {"A": "1", "B": "2"}


def test_a_byte_order_mark_and_foreign_line_ends_are_fine() -> None:
    text = "\ufeffservices:\r\n  a: {command: x}\r\n"
    assert parse_config(text.encode(), name="up.yaml", environment={}).services[0].name == "a"


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
MERGES = f"a: &a {{{', '.join(f'k{number}: 1' for number in range(500))}}}\nb: {{<<: [{', '.join(['*a'] * 500)}]}}\n"
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 60))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "up.yaml:1: the file is empty; allowed: lifecycle, services, strategy"),
        ("# only a remark\n", "up.yaml:1: the file is empty; allowed: lifecycle"),
        ("--- ~\n", "up.yaml:1: the file is empty; allowed: lifecycle"),
        ("[a]", "up.yaml:1: the file is a list and no mapping; allowed: lifecycle"),
        ("word", "up.yaml:1: the file is 'word' and no mapping; allowed: lifecycle"),
        ("services:\n\ta: 1\n", "up.yaml:2: a tab indents this line; allowed: spaces"),
        ("services:\n  a: 1\n  \tb: 1\n", "up.yaml:3: a tab indents this line; allowed: spaces"),
        ("services: [\n", "up.yaml:2: this is no YAML: while parsing a flow"),
        ("a: b: c\n", "up.yaml:1: this is no YAML: mapping values are not allowed"),
        ("a: 1\nb: 2\na: 3\n", "up.yaml:3: a: the key stands twice, also in line 1; allowed: once"),
        ("a: 1\n---\nb: 1\n", "up.yaml:2: a second document begins; allowed: one"),
        (
            "a: !!python/object:os.system x\n",
            "up.yaml:1: the tag tag:yaml.org,2002:python/object:os.system is not allowed",
        ),
        ("a: !mine x\n", "up.yaml:1: the tag !mine is not allowed; allowed: values without a tag"),
        ("a: *b\n", "up.yaml:1: the alias *b has no anchor before it; allowed: an alias of an &b above"),
        ("a: &b [*b]\n", "up.yaml:1: the alias *b stands in its own anchor; allowed: an alias behind it"),
        ("a: {<<: word}\n", "up.yaml:1: <<: this is no mapping; allowed: an alias of a mapping, or a list of these"),
        ("? [a]\n: 1\n", "up.yaml:1: a key is no text; allowed: a text"),
        ("~: 1\n", "up.yaml:1: a key is no text; allowed: a text"),
        ("a: \x01\n", "up.yaml:1: the character 0x1 is not allowed in YAML; allowed: text"),
        ("[" * 100 + "]" * 100, "up.yaml:1: values are nested too deeply; allowed: 40 levels"),
        (CHAIN, "up.yaml:1: values are nested too deeply by aliases; allowed: 40 levels"),
        (LAUGHS, "up.yaml:1: there are too many values, those of aliases included; allowed: 100,000"),
        (MERGES, "up.yaml:2: there are too many values, those of aliases included; allowed: 100,000"),
        ("#" * (1 << 20) + "\n", "up.yaml: the file has 1,048,577 bytes; allowed: at most 1,048,576"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_what_is_no_file_of_services(text: str, expected: str) -> None:
    assert fault(text).startswith(expected)


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^up.yaml:2: byte 0xff is no UTF-8; allowed: text in UTF-8$"):
        parse_config(b"a: 1\nb: \xff\n", name="up.yaml", environment={})


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file or directory$"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r": cannot be read: Is a directory$"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        read_config("a\0b")


def test_a_file_is_read_with_the_environment_of_the_process(tmp_path, monkeypatch) -> None:
    path = tmp_path / "up.yaml"
    path.write_text(OF_THE_DOCS)
    monkeypatch.setenv("MAINSPRING_SERVICES__WORKER__REPLICAS", "2")
    assert read_config(path).services[1].replicas == 2


def test_lines_are_those_of_keys_and_items() -> None:
    found = read_yaml(b"a:\n  - x\n  - {b: 1,\n     c: 2}\n").lines
    assert found == {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 1, "b"): 3, ("a", 1, "c"): 4}
