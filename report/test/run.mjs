// Reads the page of a recorded run and a comparison as a reader does: node test/run.mjs RUN.html COMPARISON.html
import assert from "node:assert/strict";
import { openReader } from "./reader.mjs";

const [run, comparison, executablePath] = process.argv.slice(2);
const { page, open, runSteps } = await openReader(executablePath);

const text = (selector) => page.locator(selector).allTextContents();
const title = () => page.locator(".pass-head h2").textContent();

const steps = {
  async "a recorded run opens with what was compiled, and why"() {
    await open(run);
    assert.ok(await page.locator(".frames-view").isVisible());
    const rows = await text(".frames-view tbody tr");
    assert.ok(rows.some((row) => /compiled again: .*size mismatch/.test(row)), rows.join("\n"));
    assert.ok(rows.some((row) => /graph break at \w+\.py:\d+/.test(row)), rows.join("\n"));
    assert.ok(rows.some((row) => /joint_graph_passes called at/.test(row)), rows.join("\n"));
    const phases = await page.locator(".compile-times .phases").first().getAttribute("aria-label");
    assert.match(phases, /Dynamo .* %; .*AOTAutograd/);
    const widths = await page.locator(".compile-times .phases").evaluateAll((all) => all.map((one) => one.scrollWidth <= one.clientWidth + 1));
    assert.ok(widths.length && widths.every(Boolean), "the phases of a compile are wider than their bar");
    assert.ok(!(await page.locator(".break pre").first().isVisible()));
    await page.locator(".break summary").first().click();
    assert.match(await page.locator(".break pre").first().textContent(), /Hint/);
  },

  async "a program of it leads to its passes"() {
    await page.locator(".frames-view .programs button").nth(1).click();
    assert.ok(await page.locator(".pass-view").isVisible());
    const chosen = await page.locator('select[aria-label="Captured program"] option:checked').textContent();
    assert.match(chosen, /^program 2 of \d+: forward, resumed/);
    await page.keyboard.press("3");
    assert.ok(await page.locator(".frames-view").isVisible());
    assert.equal(await page.locator("#tab-compare").count(), 0);
  },

  async "a comparison opens with both side by side, inside the window"() {
    await open(comparison);
    await page.waitForSelector(".compare .figures");
    assert.deepEqual((await text(".figures thead th")).slice(1, 3), ["triptych", "inductor"]);
    assert.ok((await text(".figures tbody th")).includes("kernel launches"));
    assert.ok((await text(".stages tbody th")).includes("kernels backward"));
    assert.equal(await page.locator(".sides > div").count(), 2);
    const width = await page.evaluate(() => document.querySelector(".compare").scrollWidth);
    assert.ok(width <= 1280, `the comparison is ${width} wide`);
    assert.ok((await page.locator(".compare .diff .row").count()) > 2);
    while (await page.locator(".compare .fold").count()) await page.locator(".compare .fold").first().click();
    const lines = await text(".compare .diff .cell");
    assert.ok(lines.some((line) => line.includes("relu")), lines.join("\n"));
  },

  async "what was drawn behind the comparison is in view when the passes are opened"() {
    await page.setViewportSize({ width: 1280, height: 480 });
    await open(comparison);
    await page.keyboard.press("1");
    await page.waitForSelector(".canvas .node");
    const row = await page.locator('.pass[aria-selected="true"]').boundingBox();
    const list = await page.locator(".passes").boundingBox();
    const stage = await page.locator('.passes [role="group"]:has([aria-selected="true"]) h3').boundingBox();
    assert.ok(row.y >= list.y + stage.height - 1 && row.y + row.height <= list.y + list.height + 1, "the chosen pass is hidden");
    const canvas = await page.locator(".canvas").boundingBox();
    const nodes = await page.locator(".canvas .node").evaluateAll((all) => all.map((one) => one.getBoundingClientRect().toJSON()));
    const inside = nodes.filter((node) => node.left >= canvas.x && node.right <= canvas.x + canvas.width && node.top >= canvas.y && node.bottom <= canvas.y + canvas.height);
    assert.ok(inside.length, "no node of the picture is in view");
    assert.ok(!(await page.locator(".purpose").first().textContent()).includes("`"));
    const [bar, icon] = [await page.locator(".bar").boundingBox(), await page.locator(".bar .icon").last().boundingBox()];
    assert.ok(icon.y - bar.y < 20, "the title bar is more than one line");
    await page.setViewportSize({ width: 1280, height: 1000 });
    await page.locator(".diff .cell.right .name").first().click();
    await page.waitForSelector(".node-panel .frames");
    const [wide, room] = await page.locator(".node-panel").evaluate((panel) => {
      panel.querySelector(".frames .link").textContent = "a/path/that/is/too/long/for_one_line/".repeat(4);
      return [panel.scrollWidth, panel.clientWidth];
    });
    assert.ok(wide <= room, "a long path is cut off");
    await page.keyboard.press("4");
  },

  async "a pass of the other compiler opens in its report, and back"() {
    const inductors = page.locator(".sides > div").nth(1).locator(".compared-pass");
    const name = await inductors.first().locator(".pass-name").textContent();
    await inductors.first().click();
    await page.waitForFunction((name) => document.querySelector(".pass-head h2")?.textContent === name, name);
    assert.match(await page.locator('select[aria-label="Report"] option:checked').textContent(), /inductor/);
    await page.keyboard.press("4");
    await page.locator(".sides > div").first().locator(".compared-pass").first().click();
    await page.waitForFunction(() => /triptych/.test(document.querySelector('select[aria-label="Report"]').selectedOptions[0].textContent));
    assert.ok((await title()).length > 3);
  },

  async "data are text, never markup"() {
    assert.equal(await page.evaluate(() => globalThis.injected), undefined);
    assert.equal(await page.locator("#app script, #app img").count(), 0);
  },
};

await runSteps(steps);
