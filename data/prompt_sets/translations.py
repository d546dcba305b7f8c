"""Open prompts: a sentence to be translated or put into other words."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_EVERYDAY = (
    "the {thing} is in the {room}",
    "{name} buys a {thing} on {day}",
    "we meet in {city} on {day}",
    "my brother works as a {job} in {city}",
    "the {color} {thing} costs {n} euros",
    "{name} cooks {dish} for {n} guests",
    "there are {n} {fruit} on the table in the {room}",
    "the train to {city} leaves at {n} o'clock",
)
_WORK = (
    "please send me the report about the {event} by {day}",
    "the {team} team meets {name} in {city}",
    "I cannot come to the {event} because I am in {city}",
    "{name} from {team} will call you on {day}",
    "the {event} was moved to {day} in {month}",
)


def _slots(dice: Dice) -> dict[str, str]:
    return {
        "thing": dice.one(words.PRODUCTS),
        "room": dice.one(words.ROOMS),
        "name": words.first_name(dice),
        "day": dice.one(words.DAYS),
        "city": dice.one(words.CITIES),
        "job": dice.one(words.JOBS),
        "color": dice.one(words.COLORS),
        "n": str(dice.between(2, 12)),
        "dish": dice.one(words.DISHES),
        "fruit": dice.one(words.FRUITS),
        "event": dice.one(words.EVENTS),
        "team": dice.one(words.TEAMS),
        "month": dice.one(words.MONTHS),
    }


def _sentence(dice: Dice, forms: tuple[str, ...]) -> str:
    text = dice.one(forms).format(**_slots(dice))
    return text[0].upper() + text[1:] + "."


def _everyday(dice: Dice) -> Fill:
    return {
        "text": _sentence(dice, _EVERYDAY),
        "language": dice.one(("French", "Spanish", "German", "Italian")),
    }


def _work(dice: Dice) -> Fill:
    return {"text": _sentence(dice, _WORK), "language": dice.one(("French", "Spanish", "German", "Italian"))}


def _two_sentences(dice: Dice) -> Fill:
    text = f"{_sentence(dice, _EVERYDAY)} {_sentence(dice, _WORK)}"
    return {"text": text, "language": dice.one(("French", "Spanish", "German"))}


def _formal(dice: Dice) -> Fill:
    return {"text": _sentence(dice, _WORK), "language": dice.one(("Portuguese", "Dutch"))}


TEMPLATES = (
    Template(
        "translate_everyday",
        "translate",
        (
            "Translate into {language}: {text}",
            "How do you say in {language}: {text}",
            "{text}\nWrite this in {language}.",
        ),
        _everyday,
    ),
    Template(
        "translate_work",
        "translate",
        (
            "Translate this message into {language}: {text}",
            "{language} please: {text}",
            "Put the following sentence into {language}. {text}",
        ),
        _work,
    ),
    Template(
        "translate_two_sentences",
        "translate",
        (
            "Translate both sentences into {language}. {text}",
            "{text}\nGive the {language} translation.",
            "What is this in {language}? {text}",
        ),
        _two_sentences,
    ),
    Template(
        "translate_with_words",
        "translate",
        (
            "Translate into {language} and list three words with their meaning: {text}",
            "{text} Give the {language} version, then explain the grammar in one sentence.",
        ),
        _formal,
        held_out=True,
    ),
)
