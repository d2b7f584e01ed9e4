"""StageMapping: which parameters belong to which pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from distensor.core.errors import StageMappingError
from distensor.nn.patterns import Pattern, listed, nearest, parse


@dataclass(frozen=True, slots=True, init=False)
class StageMapping:
    """A list of stages, each a list of patterns of module or parameter names.

    >>> StageMapping([["model.embed_tokens", "model.layers.[0-1]"], ["model.layers.[2-3]", "lm_head"]]).stage_count
    2

    Raises:
        StageMappingError: no stages, a stage without patterns, or something that is no pattern.
    """

    stages: tuple[tuple[Pattern, ...], ...]

    def __init__(self, stages: Sequence[Sequence[str]]) -> None:
        if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
            raise StageMappingError(
                f"StageMapping({stages!r}): expected a list of stages, each a list of patterns, "
                'for example [["model.embed_tokens", "model.layers.[0-1]"], ["model.layers.[2-3]", "lm_head"]]'
            )
        parsed = tuple(_parse_stage(index, patterns) for index, patterns in enumerate(stages))
        object.__setattr__(self, "stages", parsed)

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def resolve(
        self, names: Collection[str], aliases: Mapping[str, str] | None = None, modules: Collection[str] = ()
    ) -> dict[str, int]:
        """Parameter name -> stage; and name -> stage of each module without parameters that a pattern asks for.

        `aliases` maps further names of tied parameters to the name in `names`; each may have a stage of its own,
        and one name with a stage is enough. `modules` are names of modules, those without parameters among them.

        Raises:
            StageMappingError: a pattern that matches nothing, a range that reaches too far, a name in no stage or in
                two, stages without names.
        """
        known = aliases or {}
        every = [*names, *(name for name in known if name not in names)]
        found: dict[str, dict[int, str]] = {name: {} for name in every}
        bare = [module for module in modules if module and not any(name.startswith(f"{module}.") for name in every)]
        for stage, patterns in enumerate(self.stages):
            for pattern in patterns:
                matched = [name for name in every if pattern.covers(name)]
                matched = matched or [module for module in bare if pattern.covers(module)]
                if not matched:
                    raise StageMappingError(_matches_nothing(pattern, stage, every))
                if not any(pattern.far_end.covers(name) for name in (*matched, *modules)):
                    raise StageMappingError(_reaches_too_far(pattern, stage, matched))
                for name in matched:
                    found.setdefault(name, {}).setdefault(stage, pattern.text)
        _refuse_doubles(found)
        _refuse_missing(found, names, known)
        return {name: next(iter(stages)) for name, stages in found.items() if stages}


def _parse_stage(index: int, patterns: Sequence[str]) -> tuple[Pattern, ...]:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence) or not patterns:
        raise StageMappingError(f"stage {index} of the StageMapping is {patterns!r}: expected a list of patterns")
    parsed = tuple(parse(text) for text in patterns)
    for pattern in parsed:
        if pattern.problem is not None:
            raise StageMappingError(f"stage {index}, pattern {pattern.text!r}: {pattern.problem}")
    return parsed


def _matches_nothing(pattern: Pattern, stage: int, names: Iterable[str]) -> str:
    near = nearest(pattern.text, names)
    return (
        f"stage {stage}, pattern {pattern.text!r} matches no parameter and no module without any; "
        f"the nearest existing names are {listed(near)}"
    )


def _reaches_too_far(pattern: Pattern, stage: int, matched: Sequence[str]) -> str:
    return (
        f"stage {stage}, pattern {pattern.text!r}: nothing has the last index of its range; "
        f"the last parameter that it matches is {matched[-1]!r}"
    )


def _refuse_doubles(found: Mapping[str, Mapping[int, str]]) -> None:
    doubles = {name: stages for name, stages in found.items() if len(stages) > 1}
    if doubles:
        name, stages = next(iter(doubles.items()))
        where = " and ".join(f"stage {stage} (pattern {text!r})" for stage, text in stages.items())
        raise StageMappingError(
            f"{name!r} is in {where}: each parameter belongs to exactly one stage"
            + (f"; so are {listed(list(doubles)[1:])}" if len(doubles) > 1 else "")
        )


def _refuse_missing(found: Mapping[str, Mapping[int, str]], names: Collection[str], aliases: Mapping[str, str]) -> None:
    settled = {aliases.get(name, name) for name, stages in found.items() if stages}
    missing = [name for name in names if name not in settled]
    if missing:
        used = [text for stages in found.values() for text in stages.values()]
        near = nearest(missing[0], used, 1)
        raise StageMappingError(
            f"no stage for {listed(missing)}: each parameter belongs to exactly one stage"
            + (f"; the nearest pattern is {near[0]!r}" if near else "")
        )
