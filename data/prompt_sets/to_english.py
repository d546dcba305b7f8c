"""A sentence in German, French or Spanish to be translated into English."""

from data.prompt_sets import words
from data.prompt_sets.template import Dice, Fill, Template

_GERMAN = (
    "{name} hat am {weekday} in {city} ein neues {shop} eröffnet",
    "Die Regierung will bis {year} mehr als {n} Millionen Euro für {cause} ausgeben",
    "Nach Angaben der Polizei wurden bei dem Unfall {n} Menschen verletzt",
    "Der Zug nach {city} fährt heute {n} Minuten später ab",
    "Ich möchte im {season} mit meiner Familie nach {city} reisen",
    "Viele Bürger sind mit den Plänen der Stadt {city} nicht einverstanden",
    "Das Wetter in {city} war letzte Woche kalt und regnerisch",
    "{name} sagte, dass {cause} wichtiger sei als je zuvor",
    "Seit {year} arbeiten rund {n} Prozent der Angestellten von zu Hause",
    "Obwohl die Preise gestiegen sind, kaufen die Leute weiter in ihrem {shop} ein",
    "Wir haben gestern Abend {n} Stunden auf {name} gewartet",
    "Die Mannschaft aus {city} gewann das Spiel mit {n} zu {m}",
)
_FRENCH = (
    "{name} habite à {city} depuis {n} ans",
    "Le train pour {city} part à {n} heures du matin",
    "Nous avons acheté du pain et du fromage au marché",
    "Le maire de {city} a annoncé de nouvelles mesures en {year}",
    "Il pleut souvent à {city}, mais les gens sont aimables",
    "{name} voudrait apprendre à jouer du piano",
    "Plus de {n} personnes ont participé à la réunion",
    "Je ne sais pas si {name} viendra ce soir",
)
_SPANISH = (
    "{name} trabaja en una escuela de {city} desde {year}",
    "El tren a {city} sale a las {n} de la mañana",
    "Compramos fruta y verdura en el mercado todos los sábados",
    "El gobierno gastará {n} millones de euros en {year}",
    "Mi hermana vive en {city} con {m} gatos",
    "Hace mucho calor en {city} durante el verano",
    "{name} dijo que no podía venir a la reunión",
    "Más de {n} personas visitaron el museo en {year}",
)
_SENTENCES = {"German": _GERMAN, "French": _FRENCH, "Spanish": _SPANISH}


def _slots(dice: Dice) -> dict[str, str]:
    return {
        "name": words.first_name(dice),
        "city": dice.one(words.CITIES),
        "weekday": dice.one(("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag")),
        "season": dice.one(("Sommer", "Winter", "Herbst", "Juli", "August")),
        "shop": dice.one(("Geschäft", "Restaurant", "Hotel", "Museum", "Büro")),
        "cause": dice.one(("Bildung", "Forschung", "den Klimaschutz", "die Sicherheit", "den Sport")),
        "year": str(dice.between(1995, 2030)),
        "n": str(dice.between(5, 30)),
        "m": str(dice.between(2, 4)),
    }


def _one(dice: Dice, language: str) -> str:
    return dice.one(_SENTENCES[language]).format(**_slots(dice)) + "."


def _german(dice: Dice) -> Fill:
    return {"text": _one(dice, "German")}


def _any(dice: Dice) -> Fill:
    language = dice.one(("French", "Spanish"))
    return {"language": language, "text": _one(dice, language)}


def _two(dice: Dice) -> Fill:
    return {"text": f"{_one(dice, 'German')} {_one(dice, 'German')}"}


TEMPLATES = (
    Template(
        "to_english_german",
        "to_english",
        (
            "Translate German to English: {text}",
            "What does this German sentence mean? {text}",
            "{text}\nTranslate into English.",
        ),
        _german,
    ),
    Template(
        "to_english_any",
        "to_english",
        ("Translate {language} to English: {text}", "{text}\nWhat is that {language} sentence in English?"),
        _any,
    ),
    Template(
        "to_english_two",
        "to_english",
        ("Translate both German sentences to English. {text}", "In English, please: {text}"),
        _two,
        held_out=True,
    ),
)
