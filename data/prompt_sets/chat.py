"""Open prompts: advice, explanations, letters, ideas and stories."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_HOBBIES = (
    "playing the guitar, drawing portraits, cooking, running, learning Spanish, gardening, chess, "
    "photography, "
    "public speaking, swimming, knitting, writing short stories, baking bread, dancing, woodworking, yoga"
).split(", ")
_PROBLEMS = (
    "I sleep badly, I always arrive late, my desk is a mess, I forget names, I am nervous before exams, "
    "my plants keep dying, I spend too much money, I cannot focus at work, I eat too much sugar, my back "
    "hurts"
).split(", ")
_TOPICS = (
    "gravity, inflation, photosynthesis, the water cycle, vaccines, electricity, the tides, recycling, "
    "black holes, "
    "democracy, compound interest, earthquakes, batteries, the ozone layer, rainbows, volcanoes, "
    "encryption, enzymes, "
    "friction, the stock market, magnetism, evolution"
).split(", ")
_AUDIENCES = (
    "a child, a teenager, a farmer, my grandmother, a new colleague, a tourist, an artist, a student, a "
    "football fan"
).split(", ")
_OCCASIONS = (
    "a birthday party, a rainy weekend, a school project, a family dinner, a first date, a team lunch, "
    "a farewell gift, a picnic, a long train ride, a small balcony, a winter evening, a charity event"
).split(", ")
_HEROES = (
    "a shy dragon, an old sailor, a lost robot, a brave mouse, a tired baker, a young pilot, two rival "
    "chess players, "
    "a talking fern, a retired spy, a lonely lighthouse keeper, a curious cat, a clumsy wizard"
).split(", ")
_REASONS = (
    "ask for the new date of, cancel, confirm, move to next week, say thanks for, invite the team to, "
    "share the notes of"
).split(", ")


def _advice(dice: Dice) -> Fill:
    return {
        "hobby": dice.one(_HOBBIES),
        "minutes": str(dice.between(2, 12) * 5),
        "problem": dice.one(_PROBLEMS),
        "count": dice.one(("two", "three", "four")),
    }


def _explain(dice: Dice) -> Fill:
    return {
        "topic": dice.one(_TOPICS),
        "audience": dice.one(_AUDIENCES),
        "count": dice.one(("two", "three", "four")),
    }


def _email(dice: Dice) -> Fill:
    return {
        "who": words.person(dice),
        "reason": dice.one(_REASONS),
        "event": dice.one(words.EVENTS),
        "day": dice.one(words.DAYS),
    }


def _ideas(dice: Dice) -> Fill:
    return {
        "count": dice.one(("three", "four", "five")),
        "occasion": dice.one(_OCCASIONS),
        "city": dice.one(words.CITIES),
        "money": str(dice.between(2, 20) * 5),
    }


def _story(dice: Dice) -> Fill:
    return {
        "hero": dice.one(_HEROES),
        "city": dice.one(words.CITIES),
        "thing": dice.one(words.PRODUCTS),
        "count": dice.one(("three", "four", "five")),
    }


def _compare(dice: Dice) -> Fill:
    first, second = dice.some(_HOBBIES, 2)
    return {"first": first, "second": second, "audience": dice.one(_AUDIENCES)}


TEMPLATES = (
    Template(
        "chat_advice",
        "chat",
        (
            "I have {minutes} minutes a day for {hobby}, but {problem}. Give me {count} short tips.",
            "My goal is {hobby}. The trouble: {problem}. What should I do with {minutes} minutes a day, "
            "in {count} steps?",
            "{count} tips please: {hobby}, {minutes} minutes every day, although {problem}.",
        ),
        _advice,
    ),
    Template(
        "chat_explain",
        "chat",
        (
            "Explain {topic} to {audience} in {count} sentences.",
            "How would you describe {topic} to {audience}? Use {count} short sentences.",
            "In {count} sentences, what should {audience} know about {topic}?",
        ),
        _explain,
    ),
    Template(
        "chat_email",
        "chat",
        (
            "Write a short email to {who} to {reason} the {event} on {day}.",
            "Draft three lines to {who}: {reason} the {event} ({day}).",
            "I must {reason} the {event} on {day}. Write a brief message to {who}.",
        ),
        _email,
    ),
    Template(
        "chat_ideas",
        "chat",
        (
            "Give me {count} ideas for {occasion} in {city} for {money} dollars. Keep it short.",
            "I have {money} dollars for {occasion} in {city}. List {count} ideas, one line each.",
            "{occasion} in {city}, {money} dollars at most: what are {count} good ideas?",
        ),
        _ideas,
    ),
    Template(
        "chat_story",
        "chat",
        (
            "Tell a story of {count} sentences about {hero} in {city} and a {thing}.",
            "Write {count} sentences about {hero} who finds a {thing} in {city}.",
            "A very short tale ({count} sentences), please: {hero}, {city}, a {thing}.",
        ),
        _story,
    ),
    Template(
        "chat_compare",
        "chat",
        (
            "Compare {first} and {second} as a hobby for {audience}, in three sentences.",
            "Which is better for {audience}, {first} or {second}? Answer briefly.",
        ),
        _compare,
        held_out=True,
    ),
)
