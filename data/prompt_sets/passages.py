"""A passage of several sentences, asked about or to be summarised: answers that copy from the prompt."""

from data.prompt_sets import topics, words
from data.prompt_sets.template import Dice, Fill, Template

_TOWN = (
    "{town} is a town of about {n} thousand people on the coast near {city}.",
    "It was founded in {year} by fishermen from {country}, who built the old harbor and a small chapel.",
    "Today most of its people work in {trade}, and the largest employer is {company}.",
    "Every {month} the town holds a festival with music and {dish}, which draws visitors from {city}.",
    "The mayor, {who}, wants to turn the empty {room} beside the station into a school for {subject}.",
    "Critics say that the plan costs {m} million dollars, which the town does not have.",
    "In winter the road to {city} is often closed, so that goods have to come by boat.",
    "A fire destroyed half of the main street in {later}, and it took {n} years to rebuild it.",
    "The local museum shows {thing} and paintings by {other}, who was born there.",
)
_FIRM = (
    "{company} said on {day} that it would open a new plant in {city} next {month}.",
    "The plant will make up to {n} thousand units of its {product} a year and employ {m} people.",
    "Shares of the company rose {n} percent after the news, to {m} dollars.",
    "Its chief executive, {who}, told reporters that demand had never been stronger.",
    "Analysts had expected the company to build in {country}, where wages are lower.",
    "{other}, who leads the workers' union, welcomed the decision but asked for safer machines.",
    "The company was founded in {year} in a {room} and first sold {fruit}.",
    "Last year it lost {m} million dollars because a supplier in {country} had gone bankrupt.",
    "The city of {city} will pay for a new road and has promised lower taxes until {later}.",
)
_STUDY = (
    "Researchers from {city} have studied how {animal} react to {notion} for {n} years.",
    "They observed {m} groups in {place} and compared them with others that were kept in captivity.",
    "According to the study, which appeared in {later}, the animals slept {n} percent less than before.",
    "{who}, who led the work, said that the result came as a surprise.",
    "Earlier studies from {year} had found no effect at all, but they were based on few animals.",
    "Other scientists warn that {animal} in {country} may behave in another way.",
    "{other} of the university of {city}, who took no part in the study, called it careful work.",
    "The team now wants to repeat the experiment with young animals and better cameras.",
    "Funding of {m} thousand dollars came from {company} and from private donors.",
)
_QUESTIONS = (
    "Who is {who}?",
    "What happened in {later}?",
    "What does the text say about {country}?",
    "What part does {company} play?",
    "How much money is mentioned, and for what?",
    "What is the problem?",
    "What is said about {city}?",
    "What happened first?",
    "Who is {other} and what is said about them?",
)
_TOWNS = "Marlow, Eastwick, Redcliff, Stonehaven, Amberly, Northport, Willowby, Saltmere, Ashford, Bellmoor"


def _passage(dice: Dice, low: int, high: int) -> tuple[str, dict[str, str]]:
    """`low` to `high` sentences of one story in their order, and what stands in it."""
    slots = {
        "town": dice.one(_TOWNS.split(", ")),
        "city": dice.one(words.CITIES),
        "country": dice.one(words.COUNTRIES),
        "company": dice.one(words.COMPANIES),
        "product": dice.one(words.PRODUCTS),
        "who": words.person(dice),
        "other": words.person(dice),
        "day": dice.one(words.DAYS),
        "month": dice.one(words.MONTHS),
        "dish": dice.one(words.DISHES),
        "subject": dice.one(words.SUBJECTS),
        "room": dice.one(words.ROOMS),
        "fruit": dice.one(words.FRUITS),
        "trade": dice.one(("fishing", "tourism", "farming", "steel", "shipping", "paper mills")),
        "thing": dice.one(("old maps", "ship models", "coins", "fossils", "musical instruments", "letters")),
        "animal": dice.one(topics.ANIMALS),
        "place": dice.one(topics.PLACES),
        "notion": dice.one(("loud music", "city lights", "warm summers", "tourists", "drought", "strangers")),
        "n": str(dice.between(2, 40)),
        "m": str(dice.between(41, 99)),
        "year": str(dice.between(1790, 1980)),
        "later": str(dice.between(1990, 2024)),
    }
    story = dice.one((_TOWN, _FIRM, _STUDY))
    first, *rest = range(len(story))
    chosen = [first, *sorted(dice.some(rest, dice.between(low, high) - 1))]
    return " ".join(story[place].format(**slots) for place in chosen), slots


def _question(dice: Dice) -> Fill:
    text, slots = _passage(dice, 4, 7)
    return {"text": text, "question": dice.one(_QUESTIONS).format(**slots)}


def _two_passages(dice: Dice) -> Fill:
    first, slots = _passage(dice, 3, 4)
    second, _ = _passage(dice, 3, 4)
    return {"first": first, "second": second, "question": dice.one(_QUESTIONS).format(**slots)}


def _article(dice: Dice) -> Fill:
    return {"text": _passage(dice, 6, 9)[0]}


TEMPLATES = (
    Template(
        "passage_question",
        "passage",
        (
            "{text}\n\nQuestion: {question}",
            "Read this and answer. {text}\n{question}",
            "Context: {text}\n\nAnswer the question from the context: {question}",
            "{question} Use this text: {text}",
        ),
        _question,
    ),
    Template(
        "passage_two",
        "passage",
        (
            "{first}\n\n{second}\n\n{question}",
            "Documents:\n1. {first}\n2. {second}\nQuestion: {question}\nAnswer:",
        ),
        _two_passages,
    ),
    Template(
        "passage_article",
        "passage",
        (
            "Summarize: {text}",
            "Summarize this article in three sentences.\n{text}",
            "{text}\n\nGive a short summary of the text above.",
        ),
        _article,
    ),
    Template(
        "passage_points",
        "passage",
        ("{text}\n\nList the key points.", "What are the main facts in this article? {text}"),
        _article,
        held_out=True,
    ),
)
