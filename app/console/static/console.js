// Keys, dialogs and the sign-in link. The pages work without this file, but for the link.
(() => {
  const SINGLE_KEYS = "attune-single-keys";
  const isOn = () => localStorage.getItem(SINGLE_KEYS) !== "off";
  const isTyping = (element) => element.closest("input, textarea, select, [contenteditable]") !== null;
  const letters = { o: "Overview", l: "Live", a: "Annotate", v: "Versions", r: "Release", t: "Learning", s: "Settings" };
  let goTo = 0; // until when a letter after "g" names a page

  const pageLink = (find) => [...document.querySelectorAll(".rail nav a")].find(find);

  function open(id) {
    const dialog = document.getElementById(id);
    if (dialog && !dialog.open) dialog.showModal();
  }

  // Rows that j and k move between, in the order of the page.
  function move(step) {
    const rows = [...document.querySelectorAll("[data-row] a[href], a[data-row]")];
    if (rows.length === 0) return;
    const at = rows.indexOf(document.activeElement);
    rows[Math.min(Math.max(at + step, 0), rows.length - 1)].focus();
  }

  // A button or a link with data-press="x" is pressed by the key x.
  function press(key) {
    const element = document.querySelector(`[data-press="${CSS.escape(key)}"]:not([disabled])`);
    if (element === null || document.querySelector("dialog[open]")) return false;
    if (element.matches("textarea, input:not([type=radio])")) element.focus();
    else element.click();
    return true;
  }

  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (key === "Enter" && (event.ctrlKey || event.metaKey) && target.form) {
      event.preventDefault();
      target.form.requestSubmit();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(target)) {
      if (key === "Escape") target.blur();
      return;
    }
    if (!isOn() && key !== "?") return;
    let done = true;
    if (Date.now() < goTo && letters[key]) pageLink((link) => link.textContent === letters[key])?.click();
    else if (key === "g") goTo = Date.now() + 1500;
    else if (press(key)) done = true;
    else if (/^[1-9]$/.test(key) && pageLink((link) => link.dataset.key === key)) pageLink((link) => link.dataset.key === key).click();
    else if (key === "?") open("keys");
    else if (key === "/") document.getElementById("find")?.focus();
    else if (key === "j" || key === "k") move(key === "j" ? 1 : -1);
    else done = false;
    if (done) event.preventDefault();
    if (key !== "g") goTo = 0;
  });

  document.addEventListener("click", ({ target }) => {
    const opener = target.closest("[data-open]");
    if (opener) open(opener.dataset.open);
  });

  document.addEventListener("change", ({ target }) => {
    if (target.id === "single-keys") localStorage.setItem(SINGLE_KEYS, target.checked ? "on" : "off");
    target.closest("[data-submit-on-change]")?.requestSubmit();
  });

  document.addEventListener("DOMContentLoaded", () => {
    const box = document.getElementById("single-keys");
    if (box) box.checked = isOn();
    const byLink = document.getElementById("by-link");
    const token = new URLSearchParams(location.hash.slice(1)).get("link");
    if (byLink && token) {
      history.replaceState(null, "", location.pathname + location.search);
      byLink.elements.link.value = token;
      byLink.hidden = false;
      if (byLink.dataset.signedIn === "no") byLink.requestSubmit();
    }
  });

  // An act that must be confirmed by typing what it acts on.
  document.addEventListener("alpine:init", () => {
    Alpine.data("confirmed", () => ({
      typed: "",
      get waits() {
        return this.typed.trim() !== this.$root.dataset.expected;
      },
    }));
  });
})();
