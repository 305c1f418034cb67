"""Private parts of the verbs objects: attributes in C, rules of posting, factories, transitions."""
