"""Open prompts: a short passage to be summarised."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_NEWS = (
    "{company} opened an office in {city} on {day}",
    "{company} will close its shop in {city} next {month}",
    "{company} and the city of {city} signed a contract on {day}",
    "Workers of {company} in {city} went on strike on {day}",
)
_DETAILS = (
    "It has {n} employees and wants to hire {m} more",
    "The costs rose by {n} percent to {m} million dollars",
    "About {n} visitors came, {m} more than last year",
    "The mayor promised {n} new jobs and {m} flats",
    "The plan needs {n} weeks and {m} machines",
)
_ENDS = (
    "{who} said that the mood was good",
    "{who}, who leads the project, hopes for a quick decision",
    "Neighbours worry about noise, said {who}",
    "{who} called it a small step",
)


def _news(dice: Dice) -> Fill:
    slots = {
        "company": dice.one(words.COMPANIES),
        "city": dice.one(words.CITIES),
        "day": dice.one(words.DAYS),
        "month": dice.one(words.MONTHS),
        "n": str(dice.between(2, 40)),
        "m": str(dice.between(41, 99)),
        "who": words.person(dice),
    }
    sentences = (dice.one(part).format(**slots) for part in (_NEWS, _DETAILS, _ENDS))
    return {"text": ". ".join(sentences) + "."}


_ACTIONS = (
    "writes the report",
    "books the room",
    "calls the client",
    "checks the budget",
    "orders lunch",
    "fixes the printer",
    "sends the invitations",
    "updates the website",
    "trains the new colleague",
)


def _meeting(dice: Dice) -> Fill:
    first, second, third = dice.some(words.FIRST_NAMES, 3)
    actions = dice.some(_ACTIONS, 3)
    text = (
        f"{first} {actions[0]} by {dice.one(words.DAYS)}. {second} {actions[1]}. "
        f"{third} {actions[2]} in {dice.one(words.MONTHS)}."
    )
    return {"event": dice.one(words.EVENTS), "text": text}


def _review(dice: Dice) -> Fill:
    good, bad = dice.some(
        ("food", "service", "view", "price", "music", "staff", "location", "menu", "parking"), 2
    )
    text = (
        f"We visited {dice.one(words.COMPANIES)} in {dice.one(words.CITIES)} on {dice.one(words.DAYS)}. "
        f"The {good} was "
        f"{dice.one(('great', 'lovely', 'better than expected'))}, but the {bad} was "
        f"{dice.one(('poor', 'a disappointment', 'worse than last time'))}. I liked the "
        f"{dice.one(words.DISHES)} most."
    )
    return {"text": text}


TEMPLATES = (
    Template(
        "summarise_news",
        "summarise",
        (
            "Summarize in one sentence: {text}",
            "{text}\nWhat is the main point, in one sentence?",
            "Shorten this news to one line.\n{text}",
        ),
        _news,
    ),
    Template(
        "summarise_meeting",
        "summarise",
        (
            "Notes of the {event}: {text} Summarize them in two sentences.",
            "Who does what? {text} Give a short summary of the {event}.",
            "Sum up the {event} briefly. {text}",
        ),
        _meeting,
    ),
    Template(
        "summarise_review",
        "summarise",
        (
            "Summarize this review in one sentence: {text}",
            "{text}\nIs the review good or bad, and why? One or two sentences.",
            "Give this review a title and a summary of one line. {text}",
        ),
        _review,
    ),
    Template(
        "summarise_bullets",
        "summarise",
        ("List the facts of this text as bullet points: {text}", "{text}\nTurn it into three bullet points."),
        _news,
        held_out=True,
    ),
)
