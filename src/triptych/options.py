"""Every option of the compiler: typed, documented, validated."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .errors import TriptychError, UnknownName

CustomPass = Any
"""A function of the graph, a Rule or a Pass, which are not known here."""
CustomPasses = CustomPass | Sequence[CustomPass] | None

CODEGENS = ("inductor", "eager")
VERIFY_LEVELS = ("off", "final", "each")
ON_ERROR = ("fallback", "raise")
TUNE = ("off", "unsure", "all")
CUDA_GRAPHS = ("auto", "on", "off")
LINKS = ("auto", "nvlink", "pcie", "infiniband", "ethernet", "memory")
ON_ERROR_VARIABLE = "TRIPTYCH_ON_ERROR"
ADD_RULES = "add_rules"
STAGES_OF_RULES = ("pre_grad", "joint", "post_grad")
"""The stages in which the user's rules run."""
HOOKS = (
    ADD_RULES, "pre_grad_custom_pre_pass", "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass",
)  # fmt: skip
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


INDUCTOR_PREFIX = "inductor."
_OURS = "Triptych's passes take the place of Inductor's own"
_HOOK = "it is an option of Triptych's by the same name"
OURS_INSTEAD_OF_INDUCTORS = {
    "pattern_matcher": _OURS, "use_joint_graph_passes": _OURS, "use_pre_grad_passes": _OURS,
    "use_post_grad_passes": _OURS, "reorder_for_locality": _OURS, "_fuse_ddp_communication": _OURS,
    "disabled_passes": "say remove_passes",
    "freezing": "say freeze", "fallback_random": _HOOK, "pre_grad_custom_pass": _HOOK,
    "joint_custom_pre_pass": _HOOK, "joint_custom_post_pass": _HOOK, "post_grad_custom_pre_pass": _HOOK,
    "post_grad_custom_post_pass": _HOOK,
}  # fmt: skip
"""Inductor's settings that would run its passes over ours, or that are options here, and what to do instead."""

NAMES: dict[str, Callable[[], Any]] = {}
"""The names of all passes, rules and pass options, by which of them; the pipeline, which knows them, fills it in."""


def _doc(text: str, **kwargs: Any) -> Any:
    return field(metadata={"doc": text}, **kwargs)


@dataclass(frozen=True, repr=False)
class Options:
    """What `torch.compile(model, backend="triptych", options={...})` takes, under the same names."""

    codegen: str = _doc("who makes the kernels: 'inductor' or 'eager'", default="inductor")
    freeze: bool = _doc("the user's promise that weights stay as they are", default=False)
    known_buffers: bool = _doc(
        "read buffers that the program only reads, such as a registered causal mask, and check before each call that "
        "they hold the same",
        default=True,
    )
    known_buffers_bytes: int = _doc("larger buffers are not read", default=64 * 2**20)
    verify: str = _doc(
        "check graphs: 'off', 'final' (after a stage), 'each' (after every pass); what fails is undone and reported, "
        "or an error if on_error='raise'",
        default="off",
    )
    on_error: str = _doc(
        "when compiling fails, a pass or rule of yours raises, or a check by verify fails: 'fallback' (compile in a "
        "simpler way, go on without the pass or that rewrite, undo what the check found, with a warning) or 'raise' "
        f"(the error, which names the pass); the default can be set by the environment variable {ON_ERROR_VARIABLE}",
        default_factory=lambda: os.environ.get(ON_ERROR_VARIABLE, "fallback"),
    )
    tune: str = _doc(
        "choices that are timed on the device, once: 'off' (none), 'unsure' (where the cost model cannot tell), "
        "'all' that can be; on a CPU attention and products of one input are timed",
        default="unsure",
    )
    cuda_graphs: str = _doc(
        "replay compiled graphs as CUDA graphs: 'auto' (where the clock says that it pays), 'on', 'off'; mode "
        "reduce-overhead means 'on'",
        default="auto",
    )
    cuda_graphs_memory: float = _doc(
        "cuda_graphs='auto' leaves a program alone that would add more than this part to the process's peak of memory, "
        "and more than a hundredth of the GPU's",
        default=0.1,
    )
    add_passes: tuple[str, ...] = _doc("optional passes to run as well, by name", default=())
    remove_passes: tuple[str, ...] = _doc("passes to leave out, by exact name", default=())
    add_rules: CustomPasses = _doc("your own rules, run with the others in the stages that each names", default=None)
    pre_grad_custom_pre_pass: CustomPasses = _doc(
        "your passes before anything else, on the graph as Dynamo captured it", default=None
    )
    pre_grad_custom_pass: CustomPasses = _doc("your passes at the end of stage 1", default=None)
    joint_custom_pre_pass: CustomPasses = _doc("your passes early in stage 2", default=None)
    joint_custom_post_pass: CustomPasses = _doc("your passes late in stage 2", default=None)
    post_grad_custom_pre_pass: CustomPasses = _doc("your passes early in stage 3", default=None)
    post_grad_custom_post_pass: CustomPasses = _doc("your passes late in stage 3", default=None)
    fallback_random: bool | None = _doc(
        "keep eager's own random stream; None: as `torch._inductor.config.fallback_random` says", default=None
    )
    spmd_check: float = _doc(
        "seconds in which all ranks of a process group must compile the same collectives, else all of them raise; "
        "0: ranks are not compared",
        default=0.0,
    )
    link: str = _doc(
        "what connects the ranks, for the cost model of communication: 'nvlink', 'pcie', 'infiniband', 'ethernet', "
        "'memory' (processes on CPUs), or 'auto': by kind of device and number of ranks",
        default="auto",
    )
    stabilize_relu: bool = _doc("replace NaN after every relu by 0: other results on NaN", default=False)
    inductor_options: Mapping[str, Any] = _doc(
        "Inductor's own settings, as 'inductor.name'; without meaning where codegen is 'eager'", default_factory=dict
    )
    mode: str | None = _doc("torch.compile's mode: " + ", ".join(MODES), default=None)
    pass_options: Mapping[str, Any] = _doc("a pass's own options, as 'pass_name.option'", default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("codegen", self.codegen, CODEGENS)
        _one_of("verify level", self.verify, VERIFY_LEVELS)
        _one_of("on_error", self.on_error, ON_ERROR)
        _one_of("tune", self.tune, TUNE)
        _one_of("link", self.link, LINKS)
        _one_of("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        _require_kind("cuda_graphs_memory", self.cuda_graphs_memory, 0.1)
        if self.mode is not None:
            _one_of("mode", self.mode, MODES)
        for switch in ("freeze", "known_buffers", "stabilize_relu"):
            _require_kind(switch, getattr(self, switch), False)
        if self.fallback_random is not None:
            _require_kind("fallback_random", self.fallback_random, False)
        for mapping in ("pass_options", "inductor_options"):
            _require_mapping(mapping, getattr(self, mapping))
        if type(self.known_buffers_bytes) is not int or self.known_buffers_bytes < 0:
            raise TriptychError(f"known_buffers_bytes is a number of bytes, not {self.known_buffers_bytes!r}")
        if isinstance(self.spmd_check, bool) or not isinstance(self.spmd_check, (int, float)) or self.spmd_check < 0:
            raise TriptychError(f"spmd_check is a number of seconds, not {self.spmd_check!r}")
        for hook in HOOKS:
            self.custom_passes(hook)  # a wrong one is said now, not in the middle of a compile
        object.__setattr__(self, "add_passes", name_list(self.add_passes))
        object.__setattr__(self, "remove_passes", name_list(self.remove_passes))

    def __repr__(self) -> str:
        """What differs from the defaults."""
        default = Options()
        names = [one.name for one in fields(self) if getattr(self, one.name) != getattr(default, one.name)]
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def replays(self) -> str:
        """Are launches recorded once and replayed together: 'auto', 'on' or 'off'?"""
        if self.codegen != "inductor" or self.cuda_graphs == "off" or self.mode == "max-autotune-no-cudagraphs":
            return "off"
        asked = self.inductor_options.get("triton.cudagraphs", None)
        if asked is None:
            return "on" if self.mode in ("reduce-overhead", "max-autotune") else self.cuda_graphs
        return "on" if asked else "off"

    @property
    def is_replayed(self) -> bool:
        """Is every program replayed that can be? Then the host's share of launches is nothing."""
        return self.replays == "on"

    @staticmethod
    def make(options: Mapping[str, Any] | Options | None = None, mode: str | None = None) -> Options:
        """Options from what `torch.compile` hands over; an unknown name is an error that names the near ones."""
        if isinstance(options, Options):
            given = options if mode is None else replace(options, mode=mode)
            given.check_names()
            return given
        if options is not None and not isinstance(options, Mapping):
            raise TriptychError(f"options is a dict or a triptych.Options, not {_shown(options)}")
        known = {f.name for f in fields(Options)}
        plain: dict[str, Any] = {}
        dotted: dict[str, Any] = {}
        inductor: dict[str, Any] = {}
        for name, value in (options or {}).items():
            if not isinstance(name, str):
                raise TriptychError(f"options are named by strings, not by {_shown(name)}: {name}")
            if name.startswith(INDUCTOR_PREFIX):
                inductor[name.removeprefix(INDUCTOR_PREFIX)] = value
            elif "." in name:
                dotted[name] = value
            elif name in known:
                plain[name] = value
            else:
                raise _unknown_option(name)
        if mode is not None:
            plain["mode"] = mode
        dotted.update(_require_mapping("pass_options", plain.pop("pass_options", {})))
        inductor.update(_require_mapping("inductor_options", plain.pop("inductor_options", {})))
        made = Options(**plain, pass_options=dotted, inductor_options=inductor)
        made.check_names()
        return made

    def check_names(self) -> None:
        """Names of passes and rules, and the options of passes, must exist."""
        own = {one.rule_name() for one in self.custom_passes(ADD_RULES)}
        # each list of names is asked for only if it is needed: it is read from the passes, all of which are imported
        if self.add_passes:
            _require_known("pass", self.add_passes, NAMES["passes"]() | NAMES["rules that run"]())
        for one in self.custom_passes(ADD_RULES):
            _require_known(f"stage for the rule {one.rule_name()}", one.stages, STAGES_OF_RULES)
        if self.remove_passes:
            _require_known("pass or rule", self.remove_passes, NAMES["passes"]() | NAMES["rules"]() | own)
        for name in self.remove_passes:
            if name in NAMES["required"]():
                raise TriptychError(f"{name} cannot be removed: what follows it cannot do without it")
        if self.pass_options:
            defaults = NAMES["pass options"]()
            for name, value in self.pass_options.items():
                if name not in defaults:
                    raise _unknown_option(name)
                _require_kind(name, value, defaults[name])
        if self.inductor_options:  # only then: the names are in a module of Inductor's
            settings = NAMES["Inductor's settings"]()
            _require_known("option of Inductor", self.inductor_options, settings)
            for name, value in self.inductor_options.items():
                if isinstance(kind := settings[name], type) and not isinstance(value, kind):
                    raise TriptychError(f"{INDUCTOR_PREFIX}{name} is of type {kind.__name__}, not {value!r}")
        for name, instead in OURS_INSTEAD_OF_INDUCTORS.items():
            if name in self.inductor_options:
                raise TriptychError(f"{INDUCTOR_PREFIX}{name} cannot be set: {instead}")

    def custom_passes(self, hook: str) -> tuple[CustomPass, ...]:
        """The user's passes of one hook, in the order given."""
        given = getattr(self, hook)
        if given is None:
            return ()
        passes = (given,) if callable(given) or not isinstance(given, (list, tuple)) else tuple(given)
        for one in passes:
            if hook == ADD_RULES and not hasattr(one, "rewrite"):
                raise TriptychError(f"{hook} takes a Rule or a list of them, not {_shown(one)}")
            if not (callable(one) or hasattr(one, "rewrite") or hasattr(one, "rules")):
                what = "a callable, a Rule, a Pass or a list of them"
                raise TriptychError(f"{hook} takes {what}, not {type(one).__name__}")
            if hasattr(one, "require_complete"):
                one.require_complete()
        return passes


def _unknown_option(name: str) -> UnknownName:
    settings = NAMES["Inductor's settings"]()
    if name in settings:
        prefixed = INDUCTOR_PREFIX + name
        return UnknownName("option", name, [], hint=f"it is one of Inductor's, which are given as {prefixed!r}")
    return UnknownName("option", name, {f.name for f in fields(Options)} | set(NAMES["pass options"]()))


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def name_list(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names from a comma-separated string or a sequence."""
    if names is None:
        return ()
    if isinstance(names, str):
        names = names.split(",")
    if not isinstance(names, Iterable):
        raise TriptychError(f"passes are named by strings, not by {_shown(names)}: {names}")
    for name in names:
        if not isinstance(name, str):
            raise TriptychError(f"passes are named by strings, not by {_shown(name)}: {name}")
    return tuple(n.strip() for n in names if n.strip())


KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}
"""By the type of an option's default: the types that it takes, and how to say so."""


def _require_kind(name: str, value: Any, default: Any) -> None:
    """The value of an option must be of the kind of its default; a count or an amount is not negative."""
    if type(default) not in KINDS:
        return
    types, kind = KINDS[type(default)]
    if not isinstance(value, types) or isinstance(value, bool) and bool not in types:
        raise TriptychError(f"{name} is {kind}, not {value!r}")
    if isinstance(default, (int, float)) and isinstance(value, (int, float)) and default >= 0 > value:
        raise TriptychError(f"{name} cannot be negative: {value!r}")


def _require_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TriptychError(f"{name} is a dict of options and their values, not {_shown(value)}")
    return value


def _one_of(kind: str, value: Any, known: Sequence[str]) -> None:
    _require_known(kind, [value], known)


def _require_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownName(kind, name, known)
