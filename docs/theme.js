// A table that can be scrolled can be reached by the keyboard, too.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    for (const table of document.querySelectorAll(".md-typeset__scrollwrap"))
      table.tabIndex = 0;
  })
);
