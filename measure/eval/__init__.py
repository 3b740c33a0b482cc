"""Small suites of questions: asked of a server, graded, and compared."""
