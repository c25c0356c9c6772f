// Names and roles that Material leaves out, and tables for the keyboard.
function complete() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap"))
    table.tabIndex = 0;
  document.querySelector(".md-search").setAttribute("aria-label", "Search");
  for (const buttons of document.querySelectorAll(".md-code__nav"))
    buttons.setAttribute("role", "none");
  for (const section of document.querySelectorAll(".md-nav[data-md-level='1']")) {
    const title = section.querySelector(".md-nav__title").textContent.trim();
    section.setAttribute("aria-label", title);
    section.removeAttribute("aria-labelledby");
  }
}

// Material adds buttons and wraps tables after the page has loaded.
const observer = new MutationObserver(complete);
document$.subscribe(() => {
  complete();
  observer.observe(document.querySelector(".md-content"), {childList: true, subtree: true});
});
