"""What people, clients and tools say in the demo. The passages are Jane Austen's."""

from __future__ import annotations

from typing import Any

COMPANION = (
    "You are a well-read companion. The reader copies out passages from novels, one at a time, "
    "and asks about them. Answer in one or two plain sentences, in the manner of the author. "
    "Say what a character feels before you say why; do not tell what happens later in the book; "
    "do not repeat the passage; when a passage leaves a thing open, leave it open. Where the "
    "reader errs in a name or a place, correct it kindly and go on. If two passages bear upon one "
    "another, say so, and say which came first. Never give advice that was not asked for."
)
TITLE = "Write a title of at most five words for a conversation that begins as follows."
COMPACT = (
    "The conversation has grown long. Write a summary of all that matters in it, so that we can "
    "go on from the summary alone: the passages by subject, what was asked, what was answered."
)
GREETING = "Good morning."
QUESTION = "What does she feel here, and why?"
EDITOR = (
    "You are the editor of a small library, and you prepare a volume of letters and passages for "
    "the press. You do not read the chapters yourself: you have three readers, and you give each "
    "of them one chapter at a time. Work in steps. In every step look at what the readers have "
    "brought you, decide what is still wanting, and hand out the next piece of work with the tool "
    "`assign`. Do not assign a chapter twice. Prefer passages of some length that can be "
    "understood without the rest of the book. Refuse passages that turn upon a riddle or a "
    "verse, for they do not bear cutting. Keep a list of what was accepted, with the name of the "
    "novel and the number of the chapter, and mend it when a reader corrects himself. When two "
    "passages resemble one another, keep the shorter. When nothing is wanting, write the "
    "contents of the volume with the tool `finish`, in the order in which the novels appeared. "
    "Be brief with the readers, and civil; they are paid by the page."
)
READER = (
    "You are a reader for a small library. The editor gives you a chapter. Fetch it page by page "
    "with the tool `turn_page`, and after each page say in one sentence whether it holds a "
    "passage that can stand alone. Note names and places as they are spelt on the page. Do not "
    "guess what stands on a page that you have not seen. When the chapter is at an end, give the "
    "best passage to the editor with the tool `hand_in`, and add nothing to it."
)
TASK = "Find three passages about a journey, a ball and a disappointment."
CHAPTERS = ("a journey", "a ball", "a disappointment")


def _tool(name: str, does: str, **parameters: str) -> dict[str, Any]:
    fields = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {
        "type": "function",
        "function": {"name": name, "description": does, "parameters": schema},
    }


EDITOR_TOOLS = (
    _tool("assign", "Gives a reader work.", reader="Whom", work="What to look for, in a line"),
    _tool("finish", "Ends the work.", contents="The contents of the volume, a line a passage"),
)
READER_TOOLS = (
    _tool("turn_page", "Shows the next page.", chapter="The chapter that is being read"),
    _tool("hand_in", "Gives a passage to the editor.", passage="The passage, word for word"),
)

PASSAGES = (
    "They arrived at Bath. Catherine was all eager delight -- her eyes were here, there, "
    "everywhere, as they approached its fine and striking environs, and afterwards drove through "
    "those streets which conducted them to the hotel. She was come to be happy, and she felt "
    "happy already.",
    "The evening of this day was very long, and melancholy, at Hartfield. The weather added what "
    "it could of gloom. A cold stormy rain set in, and nothing of July appeared but in the trees "
    "and shrubs, which the wind was despoiling, and the length of the day, which only made such "
    "cruel sights the longer visible.",
    "Marianne was silent; it was impossible for her to say what she did not feel, however trivial "
    "the occasion; and upon Elinor therefore the whole task of telling lies when politeness "
    "required it, always fell.",
    "At length, a something like composure succeeded. Suspense must be submitted to, and must not "
    "be allowed to wear her out, and make her useless. Time did something, her own exertions "
    "something more, and she resumed her attentions to Susan.",
    "Such were the kind of lamentations resounding perpetually through Longbourn House. Elizabeth "
    "tried to be diverted by them; but all sense of pleasure was lost in shame. She felt anew the "
    "justice of Mr. Darcy's objections.",
    "Understanding and gratification came together. It might be a very indifferent piece of wit, "
    "but Emma found a great deal to laugh at and enjoy in it -- and so did Frank and Harriet. It "
    "did not seem to touch the rest of the party equally.",
    "She sat some time in a good deal of agitation, listening, trembling, and fearing to be sent "
    "for every moment; but as no footsteps approached the East room, she grew gradually composed, "
    "could sit down, and be able to employ herself.",
    "Anne could just acknowledge within herself such a possibility of having been induced to "
    "marry him, as made her shudder at the idea of the misery which must have followed. It was "
    "just possible that she might have been persuaded by Lady Russell!",
    "Miss Bennet accepted her aunt's invitation with pleasure; and the Bingleys were no otherwise "
    "in her thoughts at the same time, than as she hoped by Caroline's not living in the same "
    "house with her brother, she might occasionally spend a morning with her.",
    "He was in high spirits, doing everything with happy ease, and preeminent in all the lively "
    "turns, quick resources, and playful impudence that could do honour to the game; and the "
    "round table was altogether a very comfortable contrast to the steady sobriety of the other.",
    "The same civilities and courtesies, the same success and satisfaction, took place on the "
    "morrow, and accompanied the whole progress of the picture, which was rapid and happy. Every "
    "body who saw it was pleased, but Mr. Elton was in continual raptures.",
    "Fanny, not liking to complain, found it easiest to make no answer; and though he looked at "
    "her with his usual kindness, she believed he had soon ceased to think of her countenance. "
    "He did not appear in spirits: something unconnected with her was probably amiss.",
)
