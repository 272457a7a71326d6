"""The screen of `specctl top`, drawn with Textual; it shows what `verbs` see, in the words of `render`."""
