"""Data that needs no download: text files packed into token rows, and scikit-learn's digits."""
