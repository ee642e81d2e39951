"""Prompts that neither model was trained on: first words of held-out conversations, and others."""

import random

import torch
from transformers import PreTrainedTokenizerBase

from training import processes
from training.smollm2.conversations import template_tokens
from training.smollm2.drafter import num_train_rows
from training.smollm2.settings import TURN_END_ID, Settings

MIN_TOKENS, MAX_TOKENS = 5, 120

CODE = [
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a SQL query that lists the ten customers with the highest total order value.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a C function that swaps two integers through pointers.",
    "Write a Python script that counts the words in a text file.",
    "Write a bash script that renames all .txt files in a folder to .md.",
    "Implement binary search in Python and explain how it works.",
    "Implement bubble sort in Java.",
    "Write a regular expression that matches an e-mail address, and explain its parts.",
    "Write a Python function that merges two sorted lists.",
    "Write HTML for a page with a heading, a paragraph and a list of three links.",
    "Write a CSS rule that centres a div horizontally and vertically.",
    "Write a Python function that reads a CSV file and returns the mean of the column 'price'.",
    "Write a recursive function in Python that computes a factorial.",
    "Write a Python decorator that prints how long a function takes.",
    "Write a Go program that prints the numbers from 1 to 100, and Fizz or Buzz where they divide by 3 or 5.",
    "How do I read a JSON file in Python and print its keys?",
    "Fix this Python code: for i in range(10) print(i)",
    "Write a unit test in Python for a function add(a, b).",
    "Write a Python function that finds the longest word in a sentence.",
    "Write a Rust function that sums the elements of a vector.",
    "Write a Python generator that yields prime numbers.",
]

MATHS = [
    "What is 17 times 24? Show your steps.",
    "A train travels 180 kilometres in 3 hours. What is its average speed?",
    "Solve the equation 3x + 7 = 22 for x.",
    "A shirt costs 40 dollars and is reduced by 25 percent. What is its new price?",
    "Find the area of a triangle with a base of 10 cm and a height of 6 cm.",
    "What is the derivative of x^3 + 2x^2 - 5x + 1?",
    "Anna has 12 apples. She gives a third of them to Ben and eats 2. How many are left?",
    "What is the sum of the first 20 positive integers?",
    "Solve the quadratic equation x^2 - 5x + 6 = 0.",
    "Convert 3/8 to a decimal number and to a percentage.",
    "A rectangle has a perimeter of 36 cm and a length of 10 cm. What is its width?",
    "What is the probability of rolling a sum of 7 with two dice?",
    "If 5 workers build a wall in 12 days, how long do 10 workers need?",
    "What is the integral of 2x + 3?",
    "Find the greatest common divisor of 84 and 126.",
    "A bank pays 4 percent interest per year. How much are 500 dollars worth after two years?",
    "What is the mean and the median of 3, 7, 8, 12 and 20?",
    "How many different ways are there to arrange the letters of the word MATH?",
    "Simplify the expression 2(3x - 4) + 5x.",
    "A circle has a radius of 7 cm. What are its circumference and its area?",
    "The sum of two numbers is 50 and their difference is 14. What are the numbers?",
    "How many seconds are there in 3 hours and 25 minutes?",
    "What is the square root of 144 plus the cube of 3?",
    "Tom is twice as old as Lisa. Together they are 36. How old are they?",
]

LONG = "Here are my notes.\n\n{notes}\n\nWrite a summary of these notes."


def has_conversations(settings: Settings) -> bool:
    """Return whether this run has made conversations, whose held-out ones are prompts."""
    return (settings.work / "generated_0.pt").exists()


def make_prompts(tokenizer: PreTrainedTokenizerBase, settings: Settings) -> dict[str, list[str]]:
    """Return users' first words by kind: chat, code, maths, long."""
    opening, _ = template_tokens(tokenizer)
    first = slice(len(opening), len(opening) + settings.max_user_tokens)
    trained, held_out, notes = set(), [], []
    for rank in range(processes.count()):
        generated = torch.load(settings.work / f"generated_{rank}.pt", weights_only=True)
        num_train = num_train_rows(len(generated["tokens"]), settings)
        turns = [first_turn(row) for row in generated["tokens"][:, first].tolist()]
        trained.update(turns[:num_train])
        held_out += turns[num_train:]
        notes.append(generated["tokens"][num_train:][generated["is_answer"][num_train:]])

    held_out = [turn for turn in dict.fromkeys(held_out) if turn not in trained]
    held_out = [turn for turn in held_out if MIN_TOKENS <= len(turn) <= MAX_TOKENS]
    chats = [tokenizer.decode(turn) for turn in held_out]
    chats = [chat for chat, turn in zip(chats, held_out, strict=True) if tuple(tokenizer.encode(chat)) == turn]
    return {
        "chat": chats[: settings.eval_prompts],
        "code": CODE[: settings.eval_prompts],
        "maths": MATHS[: settings.eval_prompts],
        "long": [LONG.format(notes=text) for text in cut_notes(tokenizer, torch.cat(notes), settings)],
    }


def first_turn(tokens: list[int]) -> tuple[int, ...]:
    """Return a user's words, which begin the row; nothing if they do not end in it."""
    return tuple(tokens[: tokens.index(TURN_END_ID)]) if TURN_END_ID in tokens else ()


def cut_notes(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, settings: Settings) -> list[str]:
    """Return passages of the held-out answers `tokens`, of evenly spread lengths."""
    low, high = settings.long_prompt_tokens
    tokens = tokens[tokens != TURN_END_ID]
    rng = random.Random(settings.seed)
    notes = []
    for length in torch.linspace(low, high, settings.long_prompts).int().tolist():
        start = rng.randrange(max(1, len(tokens) - length))
        notes.append(tokenizer.decode(tokens[start : start + length]))
    return notes
