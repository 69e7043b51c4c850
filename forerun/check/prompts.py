"""What the check lets a model go on from: text that repeats itself, so that every method finds something to draft.

All of it was written for this file. The first are taken first.
"""

PROMPTS = (
    "tick tock tick tock tick tock tick tock tick tock tick",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width *",
    "Shopping list:\n- 2 apples\n- 3 apples\n- 4 apples\n- 5",
    "Question: What is the capital of France?\nAnswer: The capital of France is Paris.\n\n"
    "Question: What is the capital of Italy?\nAnswer: The capital of",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Max", "age": 41, "city": "Berlin"}\n{"name":',
    "The ferry leaves at eight. The ferry comes back at nine. The ferry leaves again at ten. The ferry",
    "Once upon a time there was a fox who lived at the edge of a wood. Every morning the fox",
    "for i in range(10):\n    print(i)\n\nfor j in range(20):\n    print(j)\n\nfor k in",
    "one two three one two three one two three one two",
    "Dear Sir or Madam,\n\nI am writing to ask about the room that you",
    "| day | high | low |\n|---|---|---|\n| Monday | 21 | 12 |\n| Tuesday | 19 | 11 |\n| Wednesday |",
    "SELECT name, city FROM users WHERE age > 30;\nSELECT name, city FROM users WHERE age > 40;\nSELECT name,",
    "Translate to French.\nhello -> bonjour\nthank you -> merci\ngood night ->",
    "My grandmother's recipe for bread: take flour, water, salt and yeast. First mix the flour and",
    "na na na na na na na na na na",
    "The three laws are these. First,",
)
