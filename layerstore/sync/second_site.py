"""The images for a second site: which of a store's, by what they are used for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.attachment import attached_layer
from layerstore.digest import Digest
from layerstore.errors import NotFoundError
from layerstore.store.protocol import Store
from layerstore.sync.budget import Candidate, Choice, choose, curve
from layerstore.sync.contents import Survey, survey
from layerstore.sync.selection import filtered, listed_names
from layerstore.sync.usage import Usage


@dataclass(frozen=True, slots=True)
class SecondSite:
    """What was chosen, and of what.

    Attributes:
        choice: the images to copy.
        curve: what other budgets would cover, ascending; the chosen one among them.
        tasks: of all images in the table, those that were left out included.
        candidates: images that could be chosen.
        ineligible: images that must not leave.
        unreadable: images that the store lacks, or that can't be read.
        unused: images that the store lists and the table doesn't have.
    """

    choice: Choice
    curve: tuple[Choice, ...]
    tasks: float
    candidates: int
    ineligible: tuple[Usage, ...]
    unreadable: tuple[Usage, ...]
    unused: tuple[str, ...]

    def share(self, choice: Choice) -> float:
        """The part of all tasks that a choice covers."""
        return choice.tasks / self.tasks if self.tasks else 0.0


def choose_images(
    store: Store,
    usages: Sequence[Usage],
    budget: int,
    patterns: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> tuple[SecondSite, Survey]:
    """The images of ``store`` that cover most tasks in ``budget`` bytes, and what they reach.

    The bytes are those of what the second site has to hold: blobs of the images and of their plans, each once, as they
    are stored. What it has of that already counts as well, and what else it has doesn't.

    Args:
        store: is only read.
        usages: which image how many tasks need.
        budget: bytes.
        patterns: globs of the images to look at; all, if there is none.
        excluded: globs of others that stay.

    Raises:
        NotFoundError: no image of ``usages`` is left to look at.
        ImgtoolError: as the store; images that can't be read are in the result.
    """
    names = filtered([each.image for each in usages if each.eligible], patterns, excluded)
    if not names:
        raise NotFoundError("no image is left to choose from: none in the table is eligible and selected")
    listed = listed_names(store)
    surveyed = survey(store, names, listed)
    site = _chosen(surveyed, usages, budget, listed or frozenset())
    return site, surveyed.only(site.choice.names)


def _chosen(surveyed: Survey, usages: Sequence[Usage], budget: int, listed: frozenset[str]) -> SecondSite:
    tasks = {each.image: each.tasks for each in usages}
    plans = {plan.name: plan.sizes for plan in surveyed.plans}
    candidates = []
    for image in surveyed.images:
        sizes: dict[Digest, int] = dict(image.sizes)
        for plan in image.plans:
            sizes.update(plans.get(plan, {}))
        candidates.append(Candidate(image.name, tasks[image.name], sizes))
    choice = choose(candidates, budget)
    bad = {each.name for each in surveyed.unreadable}
    return SecondSite(
        choice,
        curve(candidates, choice),
        sum(tasks.values()),
        len(candidates),
        tuple(each for each in usages if not each.eligible),
        tuple(each for each in usages if each.image in bad),
        tuple(sorted(name for name in listed.difference(tasks) if attached_layer(name) is None)),
    )
