"""Short questions of general knowledge, as people type them into a search box."""

from collections.abc import Callable, Sequence

from data.prompt_sets import topics
from data.prompt_sets.template import Dice, Fill, Template

_ANYTHING = (*topics.SCIENCE, *topics.SOCIETY, *topics.TECHNOLOGY, *topics.THINGS, *topics.HISTORY)


def _ask(about: Sequence[str], forms: Sequence[str]) -> Callable[[Dice], Fill]:
    """One of `forms` about one of `about`: half of the time as it is typed in haste."""

    def fill(dice: Dice) -> Fill:
        question = dice.one(forms).format(it=dice.one(about))
        return {"question": dice.one((f"{question[0].upper()}{question[1:]}?", question.lower()))}

    return fill


_PLAIN = ("{question}", "In one or two sentences: {question}")

TEMPLATES = (
    Template(
        "qa_people",
        "qa",
        _PLAIN,
        _ask(
            topics.PEOPLE,
            (
                "who was {it}",
                "when was {it} born",
                "what is {it} famous for",
                "where did {it} live",
                "what did {it} do",
                "how did {it} change the world",
                "when did {it} die",
            ),
        ),
    ),
    Template(
        "qa_places",
        "qa",
        _PLAIN,
        _ask(
            topics.PLACES,
            (
                "where is {it} located",
                "what is {it} known for",
                "what is the weather like in {it}",
                "what are the main sights of {it}",
                "how big is {it}",
                "what language is spoken in {it}",
                "what is the best time to visit {it}",
            ),
        ),
    ),
    Template(
        "qa_history",
        "qa",
        _PLAIN,
        _ask(
            topics.HISTORY,
            (
                "when was {it}",
                "what caused {it}",
                "what happened after {it}",
                "who played a part in {it}",
                "why was {it} important",
                "where did {it} take place",
                "how long did {it} last",
            ),
        ),
    ),
    Template(
        "qa_films",
        "qa",
        _PLAIN,
        _ask(
            (*topics.FILMS, *topics.BOOKS),
            (
                "who wrote {it}",
                "when did {it} come out",
                "who played the lead in {it}",
                "what is {it} about",
                "where does {it} take place",
                "how does {it} end",
                "who sings the main song in {it}",
            ),
        ),
    ),
    Template(
        "qa_meaning",
        "qa",
        _PLAIN,
        _ask(
            _ANYTHING,
            (
                "what is the meaning of {it}",
                "what is {it}",
                "why do we have {it}",
                "what is the difference between {it} and its opposite",
                "where does {it} come from",
                "what is {it} used for",
            ),
        ),
    ),
    Template(
        "qa_animals",
        "qa",
        _PLAIN,
        _ask(
            topics.ANIMALS,
            (
                "what do {it} eat",
                "where do {it} live",
                "how long do {it} live",
                "how many {it} are there in the world",
                "how do {it} sleep",
                "why are {it} important for nature",
                "how fast are {it}",
                "do {it} make good pets",
            ),
        ),
    ),
    Template(
        "qa_how",
        "qa",
        ("{question}", "{question} Explain it to a student."),
        _ask((*topics.TECHNOLOGY, *topics.SCIENCE), ("how does {it} work", "who discovered {it}")),
        held_out=True,
    ),
)
