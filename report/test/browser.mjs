// Uses a report as a reader does, in Debian's chromium, from disk and without a network: node test/browser.mjs PAGE.html
import assert from "node:assert/strict";
import { openReader } from "./reader.mjs";

const [file, executablePath] = process.argv.slice(2);
const { page, open, runSteps } = await openReader(executablePath);

const steps = {
  async "it opens on a pass, with both columns inside the window"() {
    await open(file);
    await page.waitForSelector(".row.changed, .row.replaced, .row.added, .row.removed");
    const ends = await page.evaluate(() =>
      [...document.querySelectorAll(".diff .cell")].map((cell) => cell.getBoundingClientRect().right),
    );
    assert.ok(ends.length > 4 && Math.max(...ends) <= 1280, `a cell ends at ${Math.max(...ends)}`);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= 1280, `the page is ${width} wide`);
  },

  async "passes are walked with the keyboard"() {
    const shown = () => page.locator(".pass-head h2").textContent();
    await page.locator(".passes").focus();
    const seen = new Set([await shown()]);
    for (let i = 0; i < 20; i++) await page.keyboard.press("k");
    for (let i = 0; i < 4; i++) {
      seen.add(await shown());
      await page.keyboard.press(i % 2 ? "ArrowDown" : "j");
    }
    assert.ok(seen.size >= 3, [...seen].join());
    assert.equal(await page.locator('.pass[aria-selected="true"]').count(), 1);
  },

  async "a click shows a pass with its purpose and rules"() {
    for (const pass of await page.locator(".pass.changed").all()) {
      await pass.click();
      await page.waitForSelector(".row[data-start], .row.moved");
      assert.ok((await page.locator(".purpose").textContent()).length > 10);
      assert.ok((await page.locator(".rules li").count()) > 0);
    }
  },

  async "changed only is a filter, search looks at all passes"() {
    const count = () => page.locator(".pass").count();
    const changed = await count();
    await page.keyboard.press("c");
    assert.ok((await count()) > changed);
    await page.keyboard.press("c");
    await page.keyboard.press("/");
    await page.keyboard.type("topological");
    const found = await page.locator(".pass:not(.hit) .pass-name").allTextContents();
    assert.ok(found.length > 0 && found.every((name) => name.includes("topological")), found.join());
    await page.keyboard.press("Escape");
    assert.equal(await count(), changed);
    await page.keyboard.press("/");
    await page.keyboard.type("scaled_dot");
    await page.locator(".pass.hit").first().click();
    await page.waitForSelector(".row.single .cell.chosen[data-name*=scaled_dot]");
    const history = (await page.locator(".history li").allTextContents()).join("\n");
    for (const step of [/^Dynamo captured/, /fuse_attention created by fuse_attention from .*softmax/, /AOTAutograd/, /code generation/])
      assert.match(history, new RegExp(step.source, "m"));
    await page.locator(".filters input[type=search]").fill("");
  },

  async "folds open"() {
    await page.locator(".pass.changed").last().click();
    await page.waitForSelector(".fold");
    const rows = () => page.locator(".row.same").count();
    const before = await rows();
    await page.locator(".fold").first().click();
    assert.ok((await rows()) > before);
  },

  async "a node has a history, which leads elsewhere"() {
    await page.locator(".row[data-start] .cell[data-name]").first().click();
    await page.waitForSelector(".history li.current");
    const steps = page.locator(".history li:not(.current) .link:enabled");
    assert.ok((await steps.count()) > 0);
    await steps.first().click();
    await page.waitForSelector(".cell.chosen");
  },

  async "the picture shows what changed"() {
    await page.locator(".pass.changed").first().click();
    await page.waitForSelector(".canvas svg .node");
    await page.locator(".canvas .node").first().click();
    await page.waitForSelector(".history");
  },

  async "the flow leads to the graph of a stage"() {
    await page.locator(".box").first().click();
    await page.waitForSelector(".row.single");
    assert.match(await page.locator(".pass-head h2").textContent(), /Dynamo/);
  },

  async "a source line leads to its kernel and back"() {
    await page.keyboard.press("2");
    await page.waitForSelector(".source-row.has");
    await page.locator(".source-row.has").last().click();
    const line = await page.locator(".source-row.linked").first().getAttribute("data-line");
    await page.waitForSelector(".node-row.linked");
    await page.waitForSelector(".call-row.linked");
    assert.ok((await page.locator(".kernel-code pre").first().textContent()).length > 10);
    await page.locator(".call-row.linked").first().click();
    await page.waitForSelector(`.source-row.linked[data-line="${line}"]`);
    const nodes = await page.locator(".node-row.linked").count();
    assert.ok(nodes > 0);
    await page.locator(".node-row.linked").first().click();
    await page.waitForSelector(".call-row.linked");
    await page.locator(".node-row.linked").first().hover();
    await page.waitForSelector(".call-row.hovered");
  },

  async "data are text, never markup"() {
    assert.equal(await page.evaluate(() => globalThis.injected), undefined);
    assert.equal(await page.locator("#app script, #app img").count(), 0);
  },

  async "light and dark, help"() {
    const colour = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await colour();
    await page.keyboard.press("t");
    assert.notEqual(await colour(), light);
    await page.keyboard.press("?");
    assert.ok(await page.locator("dialog").isVisible());
    await page.keyboard.press("Escape");
  },
};

await runSteps(steps);
